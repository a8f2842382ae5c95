"""Some places that all tables allow, by CP-SAT."""

from collections.abc import Iterable, Mapping

from ortools.sat.python.cp_model import FEASIBLE, INFEASIBLE, OPTIMAL, CpModel, Domain

from engine.result import Status, Stop
from engine.solver import solve


def some_places(
    sizes: Mapping[str, int],
    tables: Iterable[tuple[tuple[str, ...], set[tuple[int, ...]]]],
    seconds: float,
    seed: int,
    stop: Stop,
) -> tuple[Status, dict[str, int] | None]:
    """OPTIMAL with a place for every tensor, INFEASIBLE if there are none, CANCELLED or TIME_LIMIT if it was not decided.

    sizes: places in each tensor's domain; tables: tensors with the combinations of their places that are allowed
    """
    model = CpModel()
    place = {tensor: model.new_int_var_from_domain(Domain(0, size - 1), tensor) for tensor, size in sizes.items()}
    for tensors, rows in tables:
        model.add_allowed_assignments([place[tensor] for tensor in tensors], sorted(rows))
    answer, solver = solve(model, seconds, seed, stop)
    if answer in (OPTIMAL, FEASIBLE):
        return Status.OPTIMAL, {tensor: solver.value(variable) for tensor, variable in place.items()}
    if answer == INFEASIBLE:
        return Status.INFEASIBLE, None
    return Status.CANCELLED if stop() else Status.TIME_LIMIT, None
