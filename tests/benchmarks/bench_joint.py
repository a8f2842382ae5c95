"""Fronts between affinity and balance on recorded traffic: `python -m tests.benchmarks.bench_joint`.

Of DeepSeek-V2-Lite on 8 GPUs; `bench_scale` has the times of single placements of production size.
"""

from functools import partial

import numpy as np

from engine.placement.baselines import linear_assignment
from engine.placement.joint.front import front
from engine.placement.joint.instance import JointInstance, equal_slots
from engine.placement.robust import score_matrix
from engine.placement.transitions import transitions
from tests.benchmarks.shared import V2_LITE, columns, timed

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
    places = {"linear": linear} | {f"{point.weight:.3f}": point.gpu_of_expert for point in front_points}
    shares = [np.eye(GPUS)[place] for place in places.values()]
    scores = score_matrix(shares, [pair[1] for pair in scored.values()], [pair[0] for pair in scored.values()])
    row = columns({"weight": "8", "planned (worst)": "20"} | dict.fromkeys(scored, "20"), title)
    for index, (name, place) in enumerate(places.items()):
        figures = instance.figures(place)
        there = [(figures.kept_share.min(), figures.balancedness.min())]
        there += zip(scores.kept_share[index], scores.balancedness[index], strict=True)
        row(name, *(f"{kept:.3f} / {balance:.3f}" for kept, balance in there))
    print(f"kept share / balancedness of {len(front_points)} points in {seconds:.1f} s")


def main() -> None:
    with np.load(V2_LITE) as recorded:
        halves = {name: np.array_split(recorded[name], 2) for name in ("intent", "summary")}
    seen, unseen = ({name: traffic(half[i], 64) for name, half in halves.items()} for i in (0, 1))
    scored = {f"{name}, 2nd half": pair for name, pair in unseen.items()}
    for name in seen:
        show(f"DeepSeek-V2-Lite, 8 GPUs, planned on {name}, 1st half", [seen[name]], scored, 64)
    show("planned on the 1st halves of both, worst case", list(seen.values()), scored, 64)


if __name__ == "__main__":
    main()
