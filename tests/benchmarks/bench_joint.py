"""Fronts between affinity and balance on recorded traffic: `python -m tests.benchmarks.bench_joint`."""

import sys
from functools import partial
from pathlib import Path

import numpy as np

from engine.compare.synthetic import Recipe, synthetic
from engine.placement.baselines import linear_assignment
from engine.placement.joint.front import front
from engine.placement.joint.instance import JointInstance, equal_slots
from engine.placement.joint.kernel import place_jointly
from engine.placement.joint.state import JointTerms
from engine.placement.robust import score_matrix
from engine.placement.transitions import transitions
from engine.result import Limits
from tests.benchmarks.bench_affinity import ModelOfSize
from tests.benchmarks.shared import V2_LITE, timed

TINY = Path(__file__).parents[2] / "sample_traces" / "tiny-moe"
GPUS = 8


def traffic(experts: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Transitions float64[layer - 1, expert, expert] and load float64[layer, expert] of int[token, layer, k]."""
    load = [np.bincount(chosen.ravel(), minlength=num_experts) for chosen in experts.swapaxes(0, 1).astype(np.int64)]
    return transitions(experts, num_experts), np.array(load, float)


def show(title: str, planned: list, scored: dict[str, tuple], num_experts: int, points: int = 9) -> None:
    """The front planned on (transitions, load) pairs, every point scored on all of `scored`."""
    hops, load = (np.stack(part) for part in zip(*planned, strict=True))
    instance = JointInstance(hops, load, equal_slots(num_experts, GPUS))
    front_points, seconds = timed(partial(front, instance, points=points))
    linear = np.tile(linear_assignment(num_experts, instance.slots), (instance.layers, 1))
    places = [linear, *(point.gpu_of_expert for point in front_points)]
    shares = [np.eye(GPUS)[place] for place in places]

    scores = score_matrix(shares, [pair[1] for pair in scored.values()], [pair[0] for pair in scored.values()])
    print(f"\n{title}: {len(front_points)} points in {seconds:.1f} s; kept share / balancedness on")
    print(f"{'weight':>8}  {'planned (worst)':>17}" + "".join(f"{name:>22}" for name in scored))
    kept_before = instance.figures(linear).kept_share.min(), instance.figures(linear).balancedness.min()
    rows = [("linear", *kept_before), *((f"{p.weight:.3f}", p.kept_share, p.balancedness) for p in front_points)]
    for index, (name, kept, balance) in enumerate(rows):
        there = zip(scores.kept_share[index], scores.balancedness[index], strict=True)
        cells = "".join(f"{share:>13.3f} / {balanced:.3f}" for share, balanced in there)
        print(f"{name:>8}  {kept:9.3f} / {balance:.3f}{cells}", flush=True)


def deepseek() -> None:
    with np.load(V2_LITE) as recorded:
        halves = {name: np.array_split(recorded[name], 2) for name in ("intent", "summary")}
    seen, unseen = ({name: traffic(half[i], 64) for name, half in halves.items()} for i in (0, 1))
    scored = {f"{name}, 2nd half": pair for name, pair in unseen.items()}
    for name in seen:
        show(f"DeepSeek-V2-Lite, 8 GPUs, planned on {name}, 1st half", [seen[name]], scored, 64)
    show("planned on the 1st halves of both, worst case", list(seen.values()), scored, 64)

    print("\nregret in balancedness and kept share, weight 0.5; plans: intent, summary, both (worst); 2nd halves")
    instances = [JointInstance(*pair, equal_slots(64, GPUS)) for pair in seen.values()]
    both = [np.stack([pair[part] for pair in seen.values()]) for part in (0, 1)]
    instances.append(JointInstance(*both, equal_slots(64, GPUS)))
    shares = []
    for instance in instances:
        result = place_jointly(instance, weight=0.5)
        shares.append(np.eye(GPUS)[result.solution])
        print(f"  {result.status}: objective {result.objective:.4f}, gap {result.gap:.1%}, {result.runtime:.1f} s")

    def short_of_own(score: np.ndarray) -> np.ndarray:
        return score[[0, 1], [0, 1]] - score

    scores = score_matrix(shares, [pair[1] for pair in unseen.values()], [pair[0] for pair in unseen.values()])
    print(np.round(short_of_own(scores.balancedness), 3).tolist(), end="  ")
    print(np.round(short_of_own(scores.kept_share), 3).tolist())

    start = shares[1].argmax(axis=2)
    print("\nfrom the plan for summary towards intent, weight 0.5, limited moves: objective (moves)")
    for max_moves in (0, 25, 50, 100, 200, 400, 800, None):
        result = place_jointly(instances[0], weight=0.5, start=start, max_moves=max_moves)
        moved = int((result.solution != start).sum())
        print(f"  {max_moves}: {result.objective:.4f} ({moved}), {result.runtime:.1f} s, {result.status}", flush=True)


def tiny(model: str) -> None:
    halves = {}
    for kind in ("code", "prose", "man"):
        with np.load(TINY / f"{model}-{kind}.npz") as recorded:
            halves[kind] = [traffic(half, 16) for half in np.array_split(recorded["experts"], 2)]
    scored = {f"{kind}, 2nd half": pair[1] for kind, pair in halves.items()}
    show(f"tiny-moe {model}, 8 GPUs, planned on code, 1st half", [halves["code"][0]], scored, 16)
    show("planned on the 1st halves of all three, worst case", [pair[0] for pair in halves.values()], scored, 16)


def production() -> None:
    """61 layers of 256 experts by the studio's generator: half a minute for each, from scratch and with 2000 moves."""
    print("\n61 x 256, weight 0.5, 30 s; the linear placement, the answer, what no placement is below")
    for recipe in (Recipe(8192, 0.8, 0.0), Recipe(8192, 0.5, 0.9)):
        trace = synthetic(ModelOfSize(range(61), 256, 8), recipe)
        hops, load = transitions(trace.experts, 256), trace.load
        for gpus in (32, 64):
            instance = JointInstance(hops, load, equal_slots(256, gpus))
            linear = np.tile(linear_assignment(256, instance.slots), (61, 1))
            for moves in ({}, {"start": linear, "max_moves": 2000}):
                result = place_jointly(instance, Limits(30.0), weight=0.5, **moves)
                print(
                    f"  {recipe.name}, {gpus} GPUs, moves {moves.get('max_moves')}: "
                    f"{JointTerms(instance, 0.5, True).objective(linear):.4f}, {result.objective:.4f}, {result.bound:.4f} "
                    f"({result.gap:.1%}), {result.runtime:.1f} s, {result.status}",
                    flush=True,
                )


def main() -> None:
    production()
    for model in ("alpha", "beta"):
        tiny(model)
    if V2_LITE.is_file():
        deepseek()
    else:
        print(f"{V2_LITE} is not here: no DeepSeek fronts", file=sys.stderr)


if __name__ == "__main__":
    main()
