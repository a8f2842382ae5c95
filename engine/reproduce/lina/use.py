"""The use that a step makes of a GPU (§7.2): Table 3, computing during all-to-alls, and Table 4, computing and memory."""

from functools import partial

import numpy as np

from engine.overlap.transformer import transformer_step
from engine.plan import Offload, Plan
from engine.problem import Problem
from engine.reproduce.exhibits import Chart, Claim, Exhibit, Opening
from engine.reproduce.lina.training import PACKED, factors_of_figure_7, packed, packed_timeline, paper_problem, timeline
from engine.result import Stop
from engine.simulate.training.step import simulate_step, step_state_bytes
from engine.systems import TRAINING, run
from engine.systems.pieces import linear_placement
from engine.timeline import Timeline

EFFICIENCY = {"Transformer-XL": (0.33, 0.86), "GPT-2": (0.36, 0.85), "BERT2GPT2": (0.34, 0.79)}
"""Table 3: the part of the all-to-alls in which a GPU computes, without and with packing."""
USE = {
    "Transformer-XL": (0.662, 0.834, 0.721, 1.0),
    "GPT-2": (0.623, 0.782, 0.838, 1.0),
    "BERT2GPT2": (0.635, 0.825, 0.743, 0.942),
}
"""Table 4: GPU utilisation of the baseline and of Lina, and peak use of memory of both."""
HOST = {"Transformer-XL": 1.0, "GPT-2": 1.0, "BERT2GPT2": 0.0}
"""Table 4: 1 where Lina's packed experts lie in the host's memory."""


def pipelining_efficiency(stop: Stop) -> Exhibit:
    """Table 3."""
    claims, rows, slow = [], [], factors_of_figure_7()[0]
    for model, published in EFFICIENCY.items():
        if stop():
            break
        found = {
            "one expert on a GPU": [timeline(model, 16, "+ pipelining", compute=factor) for factor in (1.0, slow)],
            f"{PACKED[model]} experts on a GPU": [packed_timeline(model, 16, compute=factor) for factor in (1.0, slow)],
        }
        for (name, steps), printed in zip(found.items(), published, strict=True):
            ours, slower = map(computing_under_all_to_alls, steps)
            quantity = f"part of the all-to-alls with computation, {model}, {name}"
            why = f"with computation as long as in Figure 7, {slow:.1f} times ours, it is {slower:.2f}"
            claims.append(Claim(quantity=quantity, published=printed, ours=ours, why=why))
            row = {"model": model, "packing": name, "efficiency": ours, "with Figure 7's computation": slower}
            rows.append(row | {"published": printed})
    chart = Chart(
        kind="bars",
        x="model",
        y="efficiency",
        series="packing",
        published="published",
        x_title="model",
        y_title="part of the all-to-alls in which a GPU computes",
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart)


def computing_under_all_to_alls(timeline: Timeline) -> float:
    """Part of the all-to-alls' time in which the first group of GPUs computes, as Table 3 counts it; 1 without all-to-alls."""
    events = timeline.events[timeline.events["resource"] == 0]
    exchanged = events[events["kind"].isin(("dispatch", "combine"))]
    computed = events[events["stream"] == "compute"].sort_values("start")
    start, end = computed["start"].to_numpy(), computed["end"].to_numpy()
    done = np.concatenate([[0.0], np.cumsum(end - start)])

    def until(times: np.ndarray) -> np.ndarray:
        """Seconds computed before each of these times."""
        place = np.searchsorted(start, times, side="right")
        return done[place] - np.where(place > 0, np.maximum(0.0, end[np.maximum(place - 1, 0)] - times), 0.0)

    first, last = exchanged["start"].to_numpy(), exchanged["end"].to_numpy()
    total = float((last - first).sum())
    return float((until(last) - until(first)).sum()) / total if total else 1.0


def computing(timeline: Timeline) -> float:
    """Part of the step in which the first group of GPUs computes."""
    events = timeline.events[(timeline.events["resource"] == 0) & (timeline.events["stream"] == "compute")]
    return float((events["end"] - events["start"]).sum() / timeline.total)


def utilisation(stop: Stop) -> Exhibit:
    """Table 4."""
    claims, rows, slow = [], [], factors_of_figure_7()[0]
    for model, (busy, busy_lina, held, held_lina) in USE.items():
        if stop():
            break
        problem = paper_problem(model)
        room = problem.cluster.values("memory").min()
        baseline = run(TRAINING["deepspeed"], problem).result.solution
        for system, plan, printed, filled in (
            ("baseline", baseline, busy, held),
            ("Lina", packed(problem, PACKED[model]), busy_lina, held_lina),
        ):
            ours, slower = (
                computing(
                    timeline(model, 16, "deepspeed", compute=factor)
                    if plan is baseline
                    else packed_timeline(model, 16, compute=factor)
                )
                for factor in (1.0, slow)
            )
            states, kept, masks = (part / room for part in bytes_held(problem, plan))
            claims += [
                Claim(
                    quantity=f"part of the step in which a GPU computes, {model}, {system}",
                    published=printed,
                    ours=ours,
                    why=f"with computation as long as in Figure 7, {slow:.1f} times ours, it is {slower:.2f}; Table 1 leaves "
                    "0.6 of a step to all but all-to-alls, Figure 7's layers 0.4",
                ),
                Claim(
                    quantity=f"peak use of memory, {model}, {system}",
                    published=filled,
                    ours=min(1.0, states + kept + masks),
                    why=f"{states:.2f} are weights, gradients and momenta, {kept:.2f} activations and {masks:.2f} the masks of "
                    "its gate, without which a third would be used",
                ),
            ]
            rows.append(
                {"model": model, "system": system, "computing": ours, "published": printed, "memory": states + kept + masks}
            )
        claims.append(_offloading(model, problem, held))
        rows.append(_on_host(model, problem))
    chart = Chart(
        kind="bars",
        x="model",
        y="computing",
        series="system",
        published="published",
        x_title="model",
        y_title="part of the step in which a GPU computes",
    )
    note = (
        "Tokens of GPT-2 and BERT2GPT2 are chosen by this table, those of Transformer-XL by Figure 7. Experts in the host's "
        "memory: copied over a link of 25 GB/s and updated at 25 GB/s of the host's memory, both assumed; open a setting to "
        "see them."
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=note)


def _offloading(model: str, problem: Problem, baseline: float) -> Claim:
    """The last column of Table 4: whether Lina's packed plan is more than fits.

    baseline: published part of the memory that the baseline uses
    """
    room, plan = problem.cluster.values("memory").min(), packed(problem, PACKED[model])
    used, states = sum(bytes_held(problem, plan)) / room, step_state_bytes(problem, plan.placement).max() / room
    before = step_state_bytes(problem, linear_placement(problem)).max() / room
    grown = (PACKED[model] - 1) * expert_activations(problem) / room
    there, moved = simulate_step(plan, problem).total, simulate_step(offloaded(plan), problem).total
    return Claim(
        quantity=f"packed experts in the host's memory (1: yes), {model}",
        published=HOST[model],
        ours=float(used > 1),
        why=f"{used:.2f} of the memory is used here, {states - before:.2f} of it by the packed weights, gradients and momenta, "
        "so these cannot have filled it; if each packed expert had activations as large as the only one's, the published "
        f"baseline's {baseline:.2f} would become {baseline + states - before + grown:.2f}; in the host's memory the step takes "
        f"{moved / there:.3f} times as long",
    )


def _on_host(model: str, problem: Problem) -> dict[str, str | float | None]:
    """A row of Lina's plan with its packed experts in the host's memory."""
    plan = offloaded(packed(problem, PACKED[model]))
    states, kept, masks = (part / problem.cluster.values("memory").min() for part in bytes_held(problem, plan))
    busy = computing(simulate_step(plan, problem))
    row = {"model": model, "system": "Lina, experts on the host", "computing": busy, "published": None}
    return row | {"memory": states + kept + masks}


def offloaded(plan: Plan) -> Plan:
    """The plan with all experts of a GPU but one in the host's memory."""
    return plan.with_parts(offload=Offload(experts=int(plan.placement.slots.max()) - 1))


def expert_activations(problem: Problem) -> float:
    """Bytes of the inputs, both sides of the ReLU, and the outputs of a GPU's experts, all layers."""
    model, step = problem.model, problem.step
    copies = step.tokens * model.experts_per_token * len(model.moe_layers)
    return copies * 2 * (model.d_model + model.d_ff) * model.bytes_per_number


def bytes_held(problem: Problem, plan: Plan) -> tuple[float, float, float]:
    """Bytes on the fullest GPU: states, activations kept for the backward pass, and the masks of a GShard gate.

    Kept are the inputs of all products, and attention's scores before and after the softmax. Each layer keeps two masks, with a
    number for every token and every place in the experts' buffers.
    """
    model, step = problem.model, problem.step
    copies = model.experts_per_token
    forward = transformer_step(model, step, len(problem.cluster.gpus)).of_phase("forward")
    inputs = sum(
        gemm.k * (copies if operator.kind == "experts" else 1)
        for operator in forward
        if operator.kind != "attention"
        for gemm in operator.gemms
    )
    scores = 2 * step.heads * step.sequence_length * model.layers
    states = float(step_state_bytes(problem, plan.placement, plan.offload).max())
    number = model.bytes_per_number * step.tokens
    return states, number * (inputs + scores), number * 2 * len(model.moe_layers) * copies * step.tokens


OPENINGS = tuple(
    Opening(
        f"{model}, 16 experts, packed ones in the host's memory",
        partial(paper_problem, model),
        "lina",
        {"packing": "lina", "offload": "packed"},
    )
    for model in PACKED
)
"""Plans with experts in the host's memory, with as many on a GPU as the paper's rule packs here."""
