"""CP-SAT, run so that it can be stopped, watched and repeated.

OR-Tools takes long to import, and a machine that only runs ranks need not have it: models stand in modules of their own,
which kernels import where they solve, before their clock starts where they always do.
"""

import threading
from collections.abc import Mapping

from ortools.sat.python.cp_model import CpModel, CpSolver, CpSolverSolutionCallback, CpSolverStatus, IntVar

from engine.result import Limits, Report, Stop, never

POLL_SECONDS = 0.02
DETERMINISTIC_SHARE = 0.5
"""Deterministic seconds given for each wall second: on ordinary cores the deterministic limit is met first."""


def solve(
    model: CpModel,
    limits: Limits,
    stop: Stop = never,
    report: Report | None = None,
    *,
    hint: Mapping[IntVar, int] | None = None,
    linearization_level: int = 1,
    probing_level: int = 2,
) -> tuple[CpSolverStatus, CpSolver]:
    """Solve `model` with one worker: its status, and the solver to read the values from.

    One worker, a fixed seed and a limit on deterministic time, `DETERMINISTIC_SHARE` of the limit's seconds, make equal calls
    give equal answers unless the wall limit ends the work before.

    report: called in the calling thread, in the units of the model
    hint: replaces the hints of the model
    linearization_level: 2 puts every constraint into the linear relaxation, for models with their difficulty in sums
    probing_level: 0 leaves out the trial of single values before the search, for models that are quickly decided

    The search runs in a helper thread: the calling thread stays free to receive signals, asks `stop` and passes its
    True on to the solver, which keeps its best answer so far.
    """
    if hint is not None:
        model.clear_hints()
        for variable, value in hint.items():
            model.add_hint(variable, value)
    solver = CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = limits.seed
    solver.parameters.max_time_in_seconds = limits.wall_seconds
    solver.parameters.max_deterministic_time = limits.seconds * DETERMINISTIC_SHARE
    solver.parameters.linearization_level = linearization_level
    solver.parameters.cp_model_probing_level = probing_level
    solver.parameters.catch_sigint_signal = False
    # This step of presolve adds up the Boolean terms of a row in 32 bits: rows of larger sums lost answers, and "optimal"
    # was proven of wrong values (CP-SAT 9.15; google/or-tools issue 5293).
    solver.parameters.presolve_inclusion_work_limit = 0
    watch = _Watch()
    outcome: list[CpSolverStatus | BaseException] = []

    def work() -> None:
        try:
            outcome.append(solver.solve(model, watch if report else None))
        except BaseException as error:
            outcome.append(error)

    helper = threading.Thread(target=work, daemon=True)
    helper.start()
    reported = None
    try:
        while helper.is_alive():
            helper.join(POLL_SECONDS)
            if report and watch.latest != reported:
                reported = watch.latest
                report(*reported)
            if stop():
                solver.stop_search()
    except BaseException:
        # An exception here (a signal handler's, or the caller's own) must not leave the solver running behind it.
        while helper.is_alive():
            solver.stop_search()
            helper.join(POLL_SECONDS)
        raise
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0], solver


def seconds_of_work(solver: CpSolver) -> float:
    """Work that a solve took, in the seconds of `Limits`; the same on every machine."""
    return solver.deterministic_time / DETERMINISTIC_SHARE


class _Watch(CpSolverSolutionCallback):
    """Keeps the last solution's objective and bound for the calling thread."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: tuple[float, float] | None = None

    def on_solution_callback(self) -> None:
        self.latest = (self.objective_value, self.best_objective_bound)
