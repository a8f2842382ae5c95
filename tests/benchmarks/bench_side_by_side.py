"""A sweep of 64 points in this process, in processes of this machine and on a Dask cluster of two workers; the sample's eight
points, which must not wait for any. Run as `python -m tests.benchmarks.bench_side_by_side` on a quiet machine."""

import os
import tempfile
from pathlib import Path

from engine import parallel
from engine.catalogue import cluster_presets
from engine.compare.sweep import Trial, sweep, trials_of
from engine.costs import Datasheet
from engine.model import MoEModel
from engine.parallel import processes
from engine.problem import Problem, make_problem
from engine.training import balanced_load, usual_step
from tests.benchmarks.shared import timed

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "tiny-moe-alpha.json"


def training(layers: int) -> Problem:
    """A training step of the sample's model with so many layers."""
    hardware = cluster_presets()["mixed-8"].cluster
    model = MoEModel.from_json(SAMPLE.read_bytes(), SAMPLE.name).model_copy(update={"layers": layers})
    return make_problem(balanced_load(model), hardware, model, Datasheet(), step=usual_step(model, len(hardware.gpus)))


def swept(label: str, problem: Problem, trials: tuple[Trial, ...], alone: float | None = None) -> tuple[list, float]:
    """The points of a sweep and its seconds, which are printed over those of a sweep alone."""
    points, seconds = timed(lambda: [point for point, _ in sweep(problem, trials)])
    print(f"{label:>40} {seconds:8.2f} s", f"{alone / seconds:4.2f} ×" if alone else "")
    return points, seconds


def main() -> None:
    default = parallel.PATIENCE
    print(f"{'preparing processes':>40} {timed(processes.prepare, 'engine.compare.sweep')[1]:8.2f} s")
    for count, layers in ((8, 8), (64, 48)):
        problem = training(layers)
        trials = trials_of(problem, "micro_op", [0.1 * (1 + place) for place in range(count - 3)])
        parallel.PATIENCE = 3600.0  # seconds in this process before others are prepared
        here, alone = swept(f"{count} points of {layers} layers in this process", problem, trials)
        parallel.PATIENCE = default
        assert swept(f"{processes.processors()} processes, once it proves long", problem, trials, alone)[0] == here
    try:
        import distributed
    except ImportError:
        print("no Dask cluster: pip install -r requirements-dask.txt")
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", local_directory=folder) as cluster,
    ):
        os.environ[parallel.ADDRESS] = cluster.scheduler_address
        assert swept("on a Dask cluster of 2 workers", problem, trials, alone)[0] == here


if __name__ == "__main__":
    main()
