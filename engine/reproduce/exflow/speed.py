"""ExFlow's communication and speed: Table I, and Figures 6, 9 and 10, on its own cluster and models."""

from dataclasses import replace
from functools import cache

import numpy as np

from engine.network import off_diagonal
from engine.reproduce.exflow.settings import (
    GPUS_OF_MODEL,
    STEP,
    Setting,
    exchanged,
    fullest,
    planned,
    recorded_problem,
    setting,
    settings,
)
from engine.reproduce.exhibits import Chart, Claim, Entry, Exhibit, Opening
from engine.reproduce.exhibits import each as looked_at
from engine.result import Stop
from engine.simulate.work import Work, loads_of
from engine.units import share

RATE = 1 / 3
"""Share of the line rate at which the all-to-alls take as large a part of the step as in Figure 9."""
FIGURE_9 = {4: 0.15, 8: 0.63, 32: 0.76}
"""Part of the four main operations that all-to-alls take, by GPUs (§V-E)."""
FIGURE_10 = {("350M-8", 8): 1.1, ("350M-16", 8): 2.2, ("350M-16", 16): 1.2, ("350M-32", 8): 1.6, ("350M-32", 16): 1.6}
"""Speedups in the text of §V-E."""
BEST_OF_64 = 1.8
SAVED = {"350M-16": 0.56, "350M-32": 0.65, "350M-64": 0.67}
"""Largest part of the all-to-alls that is saved (§I-C), and of MoE-64 the largest gain."""
OTHER_PROMPTS = (2, 32)
DECODE = STEP.model_copy(update={"phase": "decode", "output": 256})
NOTE = (
    "The models' traces are not public: tokens are the generator's, with the affinity of our recording alpha-code on four "
    "GPUs. 2,048 tokens on a GPU in prompts of 256, top-1, every other layer MoE. Plans are made from 5,000 other tokens."
)


def rows_sent(work: Work, row: float) -> float:
    """Rows between GPUs in the all-to-alls of a pass. row: bytes"""
    return float(sum(off_diagonal(part).sum() for part in (*work.dispatch, *work.combine))) / row


@cache
def volumes(name: str) -> dict[str, float]:
    """Table I's letters for a recording on eight GPUs, and the rows that our engine sends.

    p, p_star: share of the copies of a dispatch that change GPU, with contiguous blocks and with ExFlow
    deepspeed, exflow: rows; first: rows of the first all-gather in a step of decode, with its prompts' shared by their answers
    """
    problem = recorded_problem(name)
    row, trace, gpus = problem.model.bytes_per_token, problem.workload, len(problem.cluster.gpus)
    plans = {system: planned(system, problem) for system in ("linear", "exflow")}
    works = {system: loads_of(plan, problem)[0].work for system, plan in plans.items()}
    copies = trace.tokens * trace.layers * trace.k
    left = {system: sum(off_diagonal(part).sum() for part in work.dispatch) / row / copies for system, work in works.items()}
    decode = loads_of(plans["exflow"], replace(problem, serving_step=DECODE, workload=trace.spread(512)))[0].work
    return {
        "G": gpus,
        "N": trace.tokens / gpus,
        "L": trace.layers,
        "k": trace.k,
        "p": float(left["linear"]),
        "p_star": float(left["exflow"]),
        "deepspeed": rows_sent(works["linear"], row),
        "exflow": rows_sent(works["exflow"], row) + float(off_diagonal(works["exflow"].gather).sum()) / row,
        "first": float(off_diagonal(decode.prompt_gather).sum()) / row / decode.passes / 512,
    }


def formulas(letters: dict[str, float]) -> dict[str, float]:
    """Rows by Table I for k experts a token, with p in the place of a topology-aware gate's own share."""
    g, n, layers, k, p, star = (letters[name] for name in ("G", "N", "L", "k", "p", "p_star"))
    both_ways = 2 * k * g * n * layers * p
    rows = {"FasterMoE": both_ways, "TA-MoE": both_ways, "DeepSpeed-MoE": both_ways}
    if k == 2:
        del rows["TA-MoE"]  # its cell is empty
    return rows | {"ExFlow": g * n * (k * layers * star + g)}


def _table_i(stop: Stop) -> Exhibit:
    claims, rows, notes = [], [], []
    for name in ("alpha-code", "beta-code"):
        if stop():
            break
        letters = volumes(name)
        gating, by_formula = f"top-{letters['k']}", formulas(letters)
        counted = {"DeepSpeed-MoE": letters["deepspeed"], "ExFlow": letters["exflow"]}
        rows += [
            {"system": system, "gating": gating, "formula": value, "rows": counted.get(system)}
            for system, value in by_formula.items()
        ]
        why = {
            "DeepSpeed-MoE": f"Counted token by token, p = {letters['p']:.3f}: dispatch, and combine back to the token's GPU.",
            "ExFlow": f"p* = {letters['p_star']:.3f}. No GPU sends to itself: the all-gather is G − 1 rows a token, not G.",
        }
        if letters["k"] == 2:
            home = counted["ExFlow"] - by_formula["ExFlow"] + letters["G"] * letters["N"]
            why["ExFlow"] += f" The paper leaves out {home:,.0f} rows that bring the outputs of a token's experts together."
        claims += [
            Claim(quantity=f"rows sent by {system}, {gating}", published=by_formula[system], ours=mine, why=why[system])
            for system, mine in counted.items()
        ]
        if letters["k"] == 1:
            even = 12 * (2 * letters["p"] - letters["p_star"])
            notes.append(
                f"By these formulas ExFlow sends more rows than DeepSpeed-MoE on more than L (2p − p*) = {even:.0f} GPUs with "
                "12 layers, for every GPU gathers all tokens. The first all-gather, which the table leaves out, is once a "
                f"prompt: {letters['first']:.3g} rows for each token of decode with 256 tokens in and out."
            )
    note = "A topology-aware gate's p_topo needs training: p stands for it, the most that it can be. " + " ".join(notes)
    chart = Chart(
        kind="bars",
        x="system",
        y="rows",
        facet="gating",
        published="formula",
        x_title="system",
        y_title="rows between GPUs in a pass; hollow: the formula",
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=note)


def _figure_6(stop: Stop) -> Exhibit:
    rows, found, fewer = [], {}, {}
    for each in settings(stop, tuple(model for model in GPUS_OF_MODEL if not model.startswith("1.3B")), least=8):
        before, after = (each.seconds(plan) for plan in ("vanilla", "coherent"))
        whole, left, gather = exchanged(before), exchanged(after), after["all_gather"]
        key = each.model, each.gpus
        found[key] = left / whole, gather / whole
        sent = (rows_sent(loads_of(each.plans[plan], each.problem)[0].work, 1.0) for plan in ("coherent", "vanilla"))
        fewer[key] = 1 - next(sent) / next(sent)
        parts = ("DeepSpeed-MoE", whole), ("context-coherent, all-to-all", left), ("context-coherent, all-gather", gather)
        rows += [{"model": key[0], "gpus": str(key[1]), "part": part, "seconds": seconds} for part, seconds in parts]
    claims = []
    if found:
        saved = {key: 1 - left for key, (left, _) in found.items()}
        most = {key: sum(parts) for key, parts in found.items()}
        least, worst = min(saved, key=saved.get), max(most, key=most.get)
        new = most[worst] - found[worst][1] * (1 - 1 / STEP.context)
        claims = [
            Claim(
                quantity="part of the all-to-alls saved by context coherence alone (more than a half)",
                published=(0.5, 1.0),
                ours=(min(saved.values()), max(saved.values())),
                neutral=0.0,
                why=f"In rows {share(min(fewer.values()))} to {share(max(fewer.values()))}: a token that stays by chance stays "
                f"in both. In time less, since hops load ports less evenly: least with MoE-{least[0]} on {least[1]} GPUs.",
            ),
            Claim(
                quantity="communication with the all-gather, as a part of DeepSpeed-MoE's, most of all settings (less)",
                published=(0.0, 1.0),
                ours=most[worst],
                neutral=1.0,
                why=f"MoE-{worst[0]} on {worst[1]} GPUs, with all N tokens gathered as in Table I; if only the new tokens are "
                f"(one a prompt, §IV-A) it is {new:.2f}.",
            ),
        ]
    if ("590M-32", 16) in found:
        long, short = (found[model, 16][1] / sum(found[model, 16]) for model in ("590M-32", "350M-32"))
        claims.append(
            Claim(
                quantity="the all-gather's part of communication, 40 layers over 24, on 16 GPUs (less)",
                published=(0.0, 1.0),
                ours=long / short,
                neutral=1.0,
                why=f"One all-gather for 20 MoE layers in place of 12: {share(long)} of communication, not {share(short)}.",
            )
        )
    chart = Chart(
        kind="bars", x="gpus", y="seconds", series="part", facet="model", x_title="GPUs", y_title="communication in a step (s)"
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=NOTE)


def _figure_9(stop: Stop) -> Exhibit:
    claims, rows = [], []
    for gpus, published in FIGURE_9.items():
        if stop():
            break
        each, changes = setting("350M-32", gpus), ((), (RATE,), (1.0, fullest()))
        plain, *changed = (each.seconds("vanilla", *change) for change in changes)
        ours, slower, padded = (exchanged(seconds) / seconds["total"] for seconds in (plain, *changed))
        # Every layer has two all-to-alls, and a start-up of each adds to the step.
        missing = (plain["total"] - exchanged(plain)) * published / (1 - published) - exchanged(plain)
        start_up = each.problem.cluster.nodes[0].link_latency + missing / (2 * each.problem.workload.layers)
        rows.append({"gpus": str(gpus), "part": ours, "third of the rate": slower, "padded": padded, "published": published})
        claims.append(
            Claim(
                quantity=f"part of a step that all-to-alls take, {gpus} GPUs",
                published=published,
                ours=ours,
                neutral=0.0,
                why=f"At line rate. One thing changed: ports to the fabric at a third of it {share(slower)}; all-to-alls and "
                f"experts padded to the fullest expert ({_padding()}) {share(padded)}."
                + f" In one node neither is enough; start-ups of {start_up * 1e6:.0f} µs in place of 5 would be."
                * (gpus == 4),
            )
        )
    chart = Chart(
        kind="bars", x="gpus", y="part", published="published", x_title="GPUs", y_title="part of a step in all-to-alls"
    )
    note = f"MoE-32 stands for a model that the paper does not name. {NOTE}"
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=note)


def _padding() -> str:
    return f"DeepSpeed's variable capacity, with alpha-code's loads {np.mean(fullest()):.1f} rows a token"


def speedups(each: Setting, stop: Stop) -> dict[str, float]:
    """Throughput of ExFlow over DeepSpeed-MoE's: `speedup` at line rate, then with one thing changed each.

    prompts: the first all-gather counts too
    slower: ports at a third of their rate
    new tokens: only these are gathered at the end (§IV-A), one a prompt
    padded: the vanilla all-to-alls are filled up to the fullest expert (see `fullest`)
    slower, new tokens: both
    coherent; slower, new tokens, coherent: contiguous blocks run context-coherently, without any affinity
    rows: the rows a token to which these are filled up, with both, where ExFlow is 2.2 times as fast
    saved: part of the all-to-alls' time
    """
    before, after, coherent = (each.seconds(plan) for plan in looked_at(("vanilla", "exflow", "coherent"), stop))
    padded = exchanged(each.seconds("vanilla", padded=fullest())) - exchanged(before)
    slow_before, *slow_after = (each.seconds(plan, RATE) for plan in looked_at(("vanilla", "exflow", "coherent"), stop))
    new, slow, slow_coherent = (
        seconds["total"] - seconds["all_gather"] * (1 - 1 / STEP.context) for seconds in (after, *slow_after)
    )
    return {
        "speedup": before["total"] / after["total"],
        "prompts": before["total"] / (after["total"] + after["prompt_gather"]),
        "slower": slow_before["total"] / slow_after[0]["total"],
        "new tokens": before["total"] / new,
        "padded": (before["total"] + padded) / after["total"],
        "slower, new tokens": slow_before["total"] / slow,
        "coherent": before["total"] / coherent["total"],
        "slower, new tokens, coherent": slow_before["total"] / slow_coherent,
        "rows": 1 + (max(FIGURE_10.values()) * slow - slow_before["total"]) / exchanged(slow_before),
        "saved": 1 - exchanged(after) / exchanged(before),
    }


def _why(found: dict[str, float]) -> str:
    said = {name: f"{value:.2f}" for name, value in found.items()}
    return (
        f"At line rate, all N tokens gathered at the end as in Table I. One thing changed: ports at a third of the rate, which "
        f"gives nearly Figure 9's parts, {said['slower']}; only new tokens gathered (§IV-A) {said['new tokens']}; all-to-alls "
        f"padded to the fullest expert ({_padding()}) {said['padded']}; the first all-gather counted {said['prompts']}; no "
        f"placement by affinity {said['coherent']}."
    )


def _why_not_most(found: dict[str, float], stop: Stop) -> str:
    """The paper's largest speedup against its own other numbers, and by tokens on a GPU."""
    others = (Setting("350M-16", 8, prompts) for prompts in OTHER_PROMPTS)
    tokens = " and ".join(f"{speedups(each, stop)['slower, new tokens']:.2f} with {each.step.tokens:,}" for each in others)
    most = 1 / (1 - FIGURE_9[8] * SAVED["350M-16"])
    needed = (1 - 1 / FIGURE_10["350M-16", 8]) / SAVED["350M-16"]
    return (
        f" In place of 2,048 tokens on a GPU: {tokens}. The paper's own {share(SAVED['350M-16'])} saved of all-to-alls that "
        f"take {share(FIGURE_9[8])} would make {most:.2f}; 2.2 needs that they take {share(needed)}, or that every token of "
        f"DeepSpeed-MoE is sent as {found['rows']:.1f} padded rows here."
    )


def _compared(where: str, published: float, every: dict[int, dict[str, float]], more: str = "") -> list[Claim]:
    """Claims of the best of some numbers of GPUs: as our engine has it, and with what Figure 9 and §IV-A say changed."""
    claims = []
    for column, words in (("speedup", ""), ("slower, new tokens", ", ports at a third and only new tokens gathered")):
        best = max(every, key=lambda gpus: every[gpus][column])
        both = (
            "Two of the changes tested for the number at line rate, both read from the paper. With no placement by affinity "
            f"either {every[best]['slower, new tokens, coherent']:.2f}.{more}"
        )
        claims.append(
            Claim(
                quantity=f"throughput over DeepSpeed-MoE's, {where}{words}",
                published=published,
                ours=every[best][column],
                neutral=1.0,
                why=f"On {best} GPUs. " * (len(every) > 1) + (both if words else _why(every[best])),
            )
        )
    return claims


def _figure_10(stop: Stop) -> Exhibit:
    found = {(each.model, each.gpus): speedups(each, stop) for each in settings(stop)}
    rows = tuple(
        {"model": model, "gpus": str(gpus), "published": FIGURE_10.get((model, gpus))} | each
        for (model, gpus), each in found.items()
    )
    claims: list[Claim] = []
    for (model, gpus), published in FIGURE_10.items():
        if each := found.get((model, gpus)):
            more = _why_not_most(each, stop) if published == max(FIGURE_10.values()) else ""
            claims += _compared(f"MoE-{model} on {gpus} GPUs", published, {gpus: each}, more)
    of_model = {model: {gpus: each for (name, gpus), each in found.items() if name == model} for model in SAVED}
    if several := {gpus: each for gpus, each in of_model["350M-64"].items() if gpus in (8, 16, 32)}:
        claims += _compared("MoE-350M-64, best of 8, 16 and 32 GPUs", BEST_OF_64, several)
    for model, published in SAVED.items():
        if several := {gpus: each for gpus, each in of_model[model].items() if gpus >= 8}:
            best = max(several, key=lambda gpus: several[gpus]["saved"])
            claims.append(
                Claim(
                    quantity=f"part of the time of all-to-alls saved at the most, MoE-{model}",
                    published=published,
                    ours=several[best]["saved"],
                    neutral=0.0,
                    why=f"On {best} GPUs: half is the second all-to-all, the rest affinity; the all-gather is not counted.",
                )
            )
    chart = Chart(
        kind="bars",
        x="gpus",
        y="speedup",
        facet="model",
        published="published",
        x_title="GPUs",
        y_title="throughput over DeepSpeed-MoE's",
    )
    return Exhibit(claims=tuple(claims), rows=rows, chart=chart, note=NOTE)


def opening(model: str, gpus: int, system: str = "exflow") -> Opening:
    """A setting, to be planned by a system."""
    whose = {"exflow": "ExFlow", "linear": "contiguous blocks"}[system]
    return Opening(f"MoE-GPT-{model} on {gpus} GPUs, {whose}", lambda: setting(model, gpus).problem, system)


TABLE_I = Entry(
    "Table I",
    "§IV-A",
    "rows that a pass sends, by formula and counted",
    _table_i,
    tuple(
        Opening(f"{name} on 8 GPUs, ExFlow", lambda name=name: recorded_problem(name), "exflow")
        for name in ("alpha-code", "beta-code")
    ),
)
FIGURE_6_ENTRY = Entry(
    "Figure 6",
    "§V-B",
    "communication with context coherence alone",
    _figure_6,
    (opening("350M-32", 16), opening("590M-32", 16)),
)
FIGURE_9_ENTRY = Entry(
    "Figure 9",
    "§V-E",
    "part of a step in all-to-alls",
    _figure_9,
    tuple(opening("350M-32", gpus, "linear") for gpus in FIGURE_9),
)
FIGURE_10_ENTRY = Entry(
    "Figure 10",
    "§V-E",
    "throughput of whole models",
    _figure_10,
    tuple(opening(*each, system) for each in FIGURE_10 for system in ("exflow", "linear")),
)
