"""PipeMoE's printed rule for the pipeline degree (Algorithm 1), kept because people compare the exact one with it.

It splits r >= 2 into three cases, each without a maximum, takes the best r of each and compares with r = 1. The
exact times are the maximum of those cases (see `pipeline_degree`); where the printed steps differ from that:

* Line 5 swaps the two kinds of work: two times the experts and one all-to-all. Equation 19 has it the other way round, and
  so has the authors' program. With long experts r = 1 then looks worse than it is, with long all-to-alls better.
* Line 6 is the least r for which Q1 holds only if alpha_a > alpha_e. Below that the inequality of equation 27 turns round:
  a least r becomes a most r, Q1 may hold for no r >= 2, and line 7 gives the time of a pipeline that cannot be. At
  alpha_a = alpha_e the line divides by zero; there Q1 does not depend on r, and the rest of the rule is taken: 2
  where Q1 holds, nothing where it does not.
* Lines 8 and 9 take SLSQP's return, also when it gives up because a case has no r at all. It may end below 1 then,
  even below 0, where f_4 is small and wins; a number that is no degree is taken for 1. On the 864 layers of Table IV that
  happens some 60 times. The end hangs on rounding: with the common factor of inequality 36 taken out the rule misses 22 %
  of the best degrees there, as printed 25 %.
* r_3 and r_4 are real numbers and a pipeline has whole parts. Which of the two neighbours is not said; the nearer one is
  taken, as in the authors' program, and t_3 and t_4 are the formulas there.
* Line 11 returns r_1, which no line sets: 1.
* Lines 2 and 3 multiply the tokens of a GPU by its number of experts, although B·L·k of them leave each GPU whatever that
  number; beta_a is per byte in Table I, and n_d counts elements. Sizes come with the instance, so neither matters here.
"""

import math
import time
from collections.abc import Callable

import numpy as np

from engine.overlap.pipeline_degree import DegreeInstance, pipeline_degree
from engine.result import Ints, Result, Status, Stop, never, result_of

SOLVER_TOLERANCE = 1e-11
"""Tolerance of SLSQP, as in the authors' program."""

STRICT = 1e-10
"""Seconds by which the strict inequalities 35, 36, 42 and 43 must hold, as in the authors' program."""

SAME = 1e-12
"""Times this close, relatively, differ by rounding only."""

Case = tuple[Callable[[float], float], int]


def pipemoe_printed(instance: DegreeInstance, stop: Stop = never) -> Result[Ints]:
    """Algorithm 1 on every layer; `solution` is int64[layer], a degree above `max_degree` cut down to it.

    The rule knows one network stream; its degrees are timed on those of the instance. `bound` is the exact answer, so
    that the gap is the rule's loss; OPTIMAL where it loses nothing, else FEASIBLE. When `stop` answers True the
    status is CANCELLED and the layers left stay whole.
    """
    start = time.perf_counter()
    degree = np.ones(instance.layers, dtype=np.int64)
    cancelled = False
    for layer in range(instance.layers):
        if cancelled := stop():
            break
        degree[layer] = min(algorithm1(*line_of(instance, layer)), instance.max_degree[layer])
    layers = enumerate(degree.tolist())
    objective = sum(float(instance.time_of_degree(slice(n, n + 1))[0, parts - 1]) for n, parts in layers)
    bound = min(pipeline_degree(instance).bound, objective)
    status = Status.OPTIMAL if objective <= bound * (1 + SAME) else Status.FEASIBLE
    status = Status.CANCELLED if cancelled else status
    return result_of("pipeline-degree/printed", start, status, objective, bound, degree)


def line_of(instance: DegreeInstance, layer: int) -> tuple[float, float, float, float]:
    """alpha_a, beta_a·n_d, alpha_e and beta_e·n_e of a layer, in seconds."""
    return (
        float(instance.alpha_comm[layer]),
        float(instance.beta_comm[layer] * instance.size_comm[layer]),
        float(instance.alpha_comp[layer]),
        float(instance.beta_comp[layer] * instance.size_comp[layer]),
    )


def algorithm1(alpha_a: float, network: float, alpha_e: float, experts: float) -> int:
    """Lines 4-17 for one layer; arguments as from `line_of`."""
    t1 = 2 * (alpha_e + experts) + alpha_a + network
    return best_case(cases(alpha_a, network, alpha_e, experts), t1)


def best_case(cases: list[Case], t1: float) -> int:
    """Lines 10-17: of the cases the one with the least time, or 1 if none is below t1 or its degree is none."""
    t, r = min(((seconds(r), r) for seconds, r in cases), key=lambda case: case[0], default=(t1, 1))
    return max(1, r) if t < t1 else 1


def cases(alpha_a: float, network: float, alpha_e: float, experts: float) -> list[Case]:
    """Lines 6-9: (f_2, r_2), (f_3, r_3) and (f_4, r_4), without those that have no value; arguments as from `line_of`."""

    def hidden_by_experts(r: float) -> float:
        return 2 * alpha_a + experts + 2 * network / r + alpha_e * r if r else math.inf

    def filled_by_network(r: float) -> float:
        return 2 * alpha_a * r + 2 * network

    def not_q1(r: float) -> float:
        return alpha_e + experts / r - alpha_a - network / r - STRICT

    def q2(r: float) -> float:
        return r * alpha_e + experts - (2 * (r - 1) * alpha_a + 2 * (r - 1) / r * network)

    if alpha_a == alpha_e:
        second = 2 if network >= experts else None
    else:
        ratio = (experts - network) / (alpha_a - alpha_e)
        second = max(2, math.ceil(ratio)) if math.isfinite(ratio) else None
    solved = [
        (filled_by_network, second),
        (hidden_by_experts, _solve(hidden_by_experts, not_q1, lambda r: q2(r) - STRICT)),
        (filled_by_network, _solve(filled_by_network, not_q1, lambda r: -q2(r) - STRICT)),
    ]
    return [(seconds, r) for seconds, r in solved if r is not None]


def _solve(seconds: Callable[[float], float], not_q1: Callable[[float], float], second: Callable[[float], float]) -> int | None:
    """`solve` of lines 8 and 9: the whole number nearest to where SLSQP ends that starts from 2; None if nowhere."""
    from scipy.optimize import minimize

    constraints = [{"type": "ineq", "fun": lambda r, rule=rule: rule(r[0])} for rule in (not_q1, second, lambda r: r - 2)]
    with np.errstate(all="ignore"):
        degree = minimize(lambda r: seconds(r[0]), [2.0], method="SLSQP", constraints=constraints, tol=SOLVER_TOLERANCE).x[0]
    return math.floor(degree + 0.5) if math.isfinite(degree) else None
