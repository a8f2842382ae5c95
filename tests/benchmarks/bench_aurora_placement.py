"""Aurora's placement of whole models on up to 1024 GPUs: `python -m tests.benchmarks.bench_aurora_placement`."""

import time

from engine.cluster import Cluster, Node
from engine.compare.synthetic import Recipe, synthetic
from engine.costs import Datasheet
from engine.problem import Problem
from engine.systems.aurora_exclusive import assign_layers, fixed_compute
from tests.strategies import make_gpu, make_model

LAYERS, TOKENS, GPUS_PER_NODE = 58, 8192, 8


def cluster(gpus: int, mixed: bool, link: float | None) -> Cluster:
    """Nodes of eight GPUs of one type, or of four types in turn."""
    kinds = [make_gpu(kind, 50e9 / (1 + kind), 50e9 / (1 + kind), 1e15) for kind in range(4 if mixed else 1)]
    kinds = [kind.model_copy(update={"memory": 1e12}) for kind in kinds]
    nodes = tuple(
        Node(name=f"node-{at}", gpus=(kinds[at % len(kinds)],) * GPUS_PER_NODE, link_bandwidth=link)
        for at in range(gpus // GPUS_PER_NODE)
    )
    return Cluster(name="bench", nodes=nodes)


def main() -> None:
    print(
        f"{LAYERS} layers; {'experts':>8} {'GPUs':>5} {'types':>5} {'links':>5} {'skew':>5} {'seconds':>8} {'gap':>7}  note"
    )
    for experts in (256, 1024):
        model = make_model(LAYERS, experts, 8)
        for skew in (0.0, 0.8):
            trace = synthetic(model, Recipe(TOKENS, skew, 0.3))
            for gpus in (320, 1024):
                for mixed, link in ((False, 450e9), (True, 450e9), (False, None)):
                    if experts % gpus and experts > gpus:
                        continue
                    problem = Problem(trace, cluster(gpus, mixed, link), model, Datasheet())
                    problem.demand  # noqa: B018 - counted before the clock starts
                    started = time.perf_counter()
                    _, bound, notes, _ = assign_layers(problem, "even", 20.0, 0, lambda: False, lambda *_: None)
                    seconds = time.perf_counter() - started
                    # The bound counts gate and aggregation too, which no placement changes.
                    fixed = sum(step.max(axis=1).sum() for step in fixed_compute(problem).values())
                    gap = notes["placement objective"].value / (bound - fixed) - 1
                    print(
                        f"{experts:>19} {gpus:>5} {4 if mixed else 1:>5} {'yes' if link else 'no':>5} {skew:>5} "
                        f"{seconds:>8.1f} {max(gap, 0.0):>7.2%}  {notes['placement'].value}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
