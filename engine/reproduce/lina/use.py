"""The use that a step makes of a GPU (§7.2): Table 3, computing during all-to-alls, and Table 4, computing and memory."""

import numpy as np

from engine.overlap.transformer import transformer_step
from engine.plan import Plan
from engine.problem import Problem
from engine.reproduce.exhibits import Chart, Claim, Exhibit
from engine.reproduce.lina.training import PACKED, factors_of_figure_7, packed, packed_timeline, paper_problem, timeline
from engine.result import Stop
from engine.simulate.training.step import step_state_bytes
from engine.systems import TRAINING, run
from engine.timeline import Timeline

EFFICIENCY = {"Transformer-XL": (0.33, 0.86), "GPT-2": (0.36, 0.85), "BERT2GPT2": (0.34, 0.79)}
"""Table 3: the part of the all-to-alls in which a GPU computes, without and with packing."""
USE = {
    "Transformer-XL": (0.662, 0.834, 0.721, 1.0),
    "GPT-2": (0.623, 0.782, 0.838, 1.0),
    "BERT2GPT2": (0.635, 0.825, 0.743, 0.942),
}
"""Table 4: GPU utilisation of the baseline and of Lina, and peak use of memory of both."""


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
        "Tokens of GPT-2 and BERT2GPT2 are chosen by this table, those of Transformer-XL by Figure 7. Weights in the host's "
        "memory are not simulated: a plan that does not fit is refused."
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=note)


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
    states = float(step_state_bytes(problem, plan.placement).max())
    number = model.bytes_per_number * step.tokens
    return states, number * (inputs + scores), number * 2 * len(model.moe_layers) * copies * step.tokens
