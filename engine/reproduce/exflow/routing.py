"""ExFlow's studies of affinity: the hops that stay (Figures 7 and 8), training (11 and 12), tokens needed (13), other texts
(Table III). Where the paper gives no number, its words are a range: "falls" is a change from -1 to 0.
"""

from dataclasses import replace
from functools import cache

import numpy as np

from engine.catalogue import model_presets
from engine.compare.synthetic import Recipe, synthetic
from engine.reproduce.exflow.settings import alpha_stays, place, recorded_problem, recording, setting, settings, stays, strength
from engine.reproduce.exflow.speed import opening
from engine.reproduce.exhibits import Chart, Claim, Entry, Exhibit, Opening, each
from engine.result import Ints, Stop, never
from engine.units import share
from engine.workload import RoutingTrace

ON_GPU = {4: 0.5, 8: 0.4, 32: 0.28}
"""Share of tokens that stay on their GPU with affinity, by GPUs (§V-C)."""
LESS_SENT = {4: 0.4, 32: 0.25}
ON_NODE_MORE = 2.0
"""Times as many tokens stay on their node, on average (§V-D)."""
TRAINED = {251: "alpha-early-code", 485: "alpha-mid-code", 1186: "alpha-code"}
"""Recordings of one model by the step of its training."""
ENOUGH = {8: 1000, 64: 3000}
"""Tokens that are enough, by experts (§V-G)."""
TRIED = (100, 200, 500, 1000, 2000, 3000, 5000, 10_000, 20_000)
NEAR = 0.01
OTHER_TEXTS = {
    "Intra-GPU": {"C4": 0.998, "Dolma": 0.998, "Yelp": 1.005},
    "Intra-Node": {"C4": 0.997, "Dolma": 0.989, "Yelp": 1.003},
}
"""Table III: hops that stay on other texts, as a part of those on the Pile."""
TEXTS = ("code", "prose", "man")
FALLS, RISES = (-1.0, 0.0), (0.0, 1.0)
STAND_IN = (
    "The paper's traces are not public: the generator's tokens go on to the follower of their expert as often as makes as many "
    "stay on four GPUs as in our recording alpha-code."
)
OF_ALPHA = "Our small model alpha (8 MoE layers of 16 experts, top-1) stands for theirs, at steps 251, 485 and 1186."


@cache
def kept_of_64(gpus: int) -> dict[str, float]:
    """Hops of MoE-64 that stay, by chance and with ExFlow's plan, on their GPU and on their node."""
    each = setting("350M-64", gpus)
    trace = each.problem.workload
    return {
        f"{plan}, {part}": stays(each.place_of(plan), trace, size)
        for plan in ("vanilla", "exflow")
        for part, size in (("GPU", 1), ("node", 4))
    }


def _figure_7(stop: Stop) -> Exhibit:
    found = {each.gpus: kept_of_64(each.gpus) for each in settings(stop, ("350M-64",)) if each.gpus <= 32}
    alone = (
        f"The generator's affinity of {strength():.2f} is all to one follower. Followers of real routing are several, which "
        f"costs most where GPUs hold few experts: of alpha-code {share(alpha_stays(4))} stay on four GPUs, as of the "
        f"generator; on 16, with an expert each, {share(alpha_stays(16))} and of the generator "
        f"{share(strength() + (1 - strength()) / 16)}."
    )
    on_gpu = {gpus: kept["exflow, GPU"] for gpus, kept in found.items()}
    claims = [
        Claim(
            quantity=f"tokens that stay on their GPU, {gpus} GPUs" + " (over a half)" * (gpus == 4),
            published=(published, 1.0) if gpus == 4 else published,
            ours=on_gpu[gpus],
            neutral=1 / gpus,
            why=alone,
        )
        for gpus, published in ON_GPU.items()
        if gpus in found
    ]
    claims += [
        Claim(
            quantity=f"tokens fewer that leave their GPU, {gpus} GPUs",
            published=published,
            ours=1 - (1 - on_gpu[gpus]) / (1 - found[gpus]["vanilla, GPU"]),
            neutral=0.0,
            why=f"{share(on_gpu[gpus])} stay, and {share(found[gpus]['vanilla, GPU'])} with contiguous blocks; the published "
            f"part needs {share(1 - (1 - published) * (1 - 1 / gpus))}. {alone}",
        )
        for gpus, published in LESS_SENT.items()
        if gpus in found
    ]
    rows = _kept_rows(found, "GPU")
    chart = Chart(
        kind="bars",
        x="gpus",
        y="stay",
        series="plan",
        published="published",
        x_title="GPUs",
        y_title="tokens that stay on their GPU",
    )
    return Exhibit(claims=tuple(claims), rows=rows, chart=chart, note=STAND_IN)


def _kept_rows(found: dict[int, dict[str, float]], part: str) -> tuple[dict[str, str | float | None], ...]:
    """Rows of `kept_of_64` by GPUs, of GPU or node."""
    published = ON_GPU if part == "GPU" else {}
    return tuple(
        {"gpus": str(gpus), "plan": plan, "stay": kept[f"{key}, {part}"], "published": published.get(gpus) if own else None}
        for gpus, kept in found.items()
        for key, plan, own in (("vanilla", "contiguous", False), ("exflow", "ExFlow", True))
    )


def _figure_8(stop: Stop) -> Exhibit:
    found = {each.gpus: kept_of_64(each.gpus) for each in settings(stop, ("350M-64",), least=8) if each.gpus <= 32}
    times = {gpus: kept["exflow, node"] / kept["vanilla, node"] for gpus, kept in found.items()}
    said = ", ".join(f"{value:.2f} on {gpus}" for gpus, value in times.items())
    claim = Claim(
        quantity="times as many tokens stay on their node, mean of 8, 16 and 32 GPUs",
        published=ON_NODE_MORE,
        ours=sum(times.values()) / max(len(times), 1),
        neutral=1.0,
        why=f"By GPUs: {said}. On two nodes a half stays by chance, so that it can be 2 at the most.",
    )
    chart = Chart(kind="bars", x="gpus", y="stay", series="plan", x_title="GPUs", y_title="tokens that stay on their node")
    return Exhibit(claims=(claim,) if times else (), rows=_kept_rows(found, "node"), chart=chart, note=STAND_IN)


def _figure_11(stop: Stop) -> Exhibit:
    rows, fullest = [], {}
    for step, name in TRAINED.items():
        load = recording(name).load[-1]
        part = load / load.sum()
        fullest[step] = float(part.max())
        rows += [{"step": step, "expert": str(expert), "share": float(value)} for expert, value in enumerate(part)]
    first, *_, last = fullest
    said = ", ".join(f"{share(value)} at step {step}" for step, value in fullest.items())
    claim = Claim(
        quantity="share of the fullest expert of the last layer, change over training (falls)",
        published=FALLS,
        ours=fullest[last] - fullest[first],
        neutral=0.0,
        why=f"{said}; of 16 experts an even share is 6.3 %.",
    )
    chart = Chart(
        kind="lines",
        x="step",
        y="share",
        series="expert",
        x_title="step of training",
        y_title="share of tokens, last MoE layer",
    )
    return Exhibit(claims=(claim,), rows=tuple(rows), chart=chart, note=OF_ALPHA)


def _figure_12(stop: Stop) -> Exhibit:
    found: dict[tuple[int, int], float] = {}
    for step, name in TRAINED.items():
        found |= {(step, gpus): alpha_stays(gpus, name) for gpus in each((2, 4, 8, 16), stop)}
    rows = tuple({"step": step, "gpus": str(gpus), "stay": value} for (step, gpus), value in found.items())
    claims = []
    for (before, after), words, published in (((251, 485), "falls", FALLS), ((485, 1186), "rises", RISES)):
        changes = {gpus: found[after, gpus] - found[before, gpus] for step, gpus in found if step == after}
        if changes:
            said = ", ".join(f"{share(found[before, gpus])} and {share(found[after, gpus])} on {gpus}" for gpus in changes)
            claims.append(
                Claim(
                    quantity=f"tokens that stay on one of four GPUs, change from step {before} to {after} ({words})",
                    published=published,
                    ours=changes[4],
                    neutral=0.0,
                    why=f"Planned on half of the sequences, counted on the others; by GPUs: {said}.",
                )
            )
    chart = Chart(
        kind="lines", x="step", y="stay", series="gpus", x_title="step of training", y_title="tokens that stay on their GPU"
    )
    return Exhibit(claims=tuple(claims), rows=rows, chart=chart, note=OF_ALPHA)


def _pools(experts: int) -> tuple[RoutingTrace, RoutingTrace]:
    """Tokens to plan on and tokens to count on."""
    if experts == 16:
        return recording("alpha-code").halves()
    whole = synthetic(model_presets()[f"MoE-GPT-350M-{experts}"].model, Recipe(2 * TRIED[-1], 0.0, strength()))
    return whole.part(np.s_[: TRIED[-1]]), whole.part(np.s_[TRIED[-1] :])


def relative_speeds(experts: int, gpus: int = 8, stop: Stop = never) -> dict[int, float]:
    """Speed of the all-to-alls with a plan made from so many tokens, as a part of that with one made from all: the rows that
    leave their GPU with the one, over those with the other."""
    pool, rest = _pools(experts)
    tokens = [count for count in TRIED if count <= pool.tokens]
    leave = [1 - stays(place(replace(pool.spread(count), sequence=None), gpus), rest) for count in each(tokens, stop)]
    return {count: leave[-1] / mine for count, mine in zip(tokens, leave, strict=True)}


def _figure_13(stop: Stop) -> Exhibit:
    found: dict[int, dict[int, float]] = {}
    for experts in each((8, 16, 64), stop):
        found[experts] = relative_speeds(experts, stop=stop)
    rows = tuple(
        {"tokens": tokens, "experts": f"{experts} experts", "speed": speed}
        for experts, speeds in found.items()
        for tokens, speed in speeds.items()
    )
    claims = [
        Claim(
            quantity=f"speed of all-to-alls with a plan from {tokens:,} tokens, {experts} experts, over the best (enough)",
            published=1.0,
            ours=found[experts][tokens],
            spread=NEAR,
            why="The best is made from 20,000 tokens; within 1 % of it counts as enough, since the paper says no more. Here "
            f"{next(few for few, speed in found[experts].items() if speed >= 1 - NEAR):,} tokens are.",
        )
        for experts, tokens in ENOUGH.items()
        if experts in found
    ]
    chart = Chart(
        kind="lines",
        x="tokens",
        y="speed",
        series="experts",
        x_title="tokens that the plan is made from",
        y_title="speed of all-to-alls over the best",
        log_x=True,
    )
    note = f"8 GPUs; 16 experts: alpha-code itself, of which half is planned on. {STAND_IN}"
    return Exhibit(claims=tuple(claims), rows=rows, chart=chart, note=note)


@cache
def _placed_on(text: str) -> Ints:
    """int64[layer, expert]: a plan of alpha for eight GPUs in two nodes from half of a text, or from a sixth of "all"."""
    if text != "all":
        return place(recording(f"alpha-{text}").halves()[0], 8, 4)
    mixed = np.concatenate([recording(f"alpha-{text}").halves()[0].experts[::3] for text in TEXTS])
    return place(RoutingTrace("all", mixed, 16), 8, 4)


def carried_over(part: str, stop: Stop) -> dict[str, dict[str, float]]:
    """Share of the hops that stay on a GPU ("Intra-GPU") or a node, by the text planned on and the text counted on, which is
    the other half of it."""
    size = 1 if part == "Intra-GPU" else 4
    rest = {text: recording(f"alpha-{text}").halves()[1] for text in TEXTS}
    return {
        plan: {text: stays(_placed_on(plan), trace, size) for text, trace in rest.items()}
        for plan in each((*TEXTS, "all"), stop)
    }


def _table_iii(stop: Stop) -> Exhibit:
    claims, rows = [], []
    for part, published in OTHER_TEXTS.items():
        kept = carried_over(part, stop)
        relative = {text: value / kept["code"]["code"] for text, value in kept["code"].items()}
        rows += [{"hops": part, "text": f"Pile, {text}", "kept": None, "published": value} for text, value in published.items()]
        rows += [{"hops": part, "text": f"code, {text}", "kept": value, "published": None} for text, value in relative.items()]
        others = ("prose", "man")
        alone, mixed = ([f"{kept[plan][text] / kept[text][text]:.2f}" for text in others] for plan in ("code", "all"))
        claims.append(
            Claim(
                quantity=f"{part}: hops that stay on other texts, as a part of those on the text planned for",
                published=(min(published.values()), max(published.values())),
                ours=(min(relative[text] for text in others), max(relative[text] for text in others)),
                why=f"Planned on code alone: of the hops that a plan of their own would keep, prose keeps {alone[0]} and "
                f"manual pages {alone[1]}. Planned on a mixture of the three, as the Pile is one of many texts: {mixed[0]} and "
                f"{mixed[1]}.",
            )
        )
    chart = Chart(
        kind="bars",
        x="text",
        y="kept",
        facet="hops",
        published="published",
        x_title="planned on, counted on",
        y_title="hops that stay, over those on the text planned on",
    )
    note = "Our model alpha on eight GPUs in two nodes stands for theirs; code, prose and manual pages for the four data sets."
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=note)


def _recorded(*names: str) -> tuple[Opening, ...]:
    return tuple(Opening(f"{name} on 8 GPUs, ExFlow", lambda name=name: recorded_problem(name), "exflow") for name in names)


FIGURES = (
    Entry("Figure 7", "§V-C", "tokens that stay on their GPU", _figure_7, tuple(opening("350M-64", gpus) for gpus in ON_GPU)),
    Entry("Figure 8", "§V-D", "tokens that stay on their node", _figure_8, (opening("350M-64", 8), opening("350M-64", 16))),
    Entry("Figure 11", "§V-F", "balance of experts over training", _figure_11, _recorded(*TRAINED.values())),
    Entry("Figure 12", "§V-F", "affinity over training", _figure_12, _recorded(*TRAINED.values())),
    Entry("Figure 13", "§V-G", "tokens that a plan needs", _figure_13, (opening("350M-8", 8), opening("350M-64", 8))),
)
TABLE_III = Entry(
    "Table III", "§V-H", "affinity on other texts", _table_iii, _recorded("alpha-code", "alpha-prose", "alpha-man")
)
