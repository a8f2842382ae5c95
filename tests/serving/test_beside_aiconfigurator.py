"""DeepSeek-V3 on 32 H200, balanced: a whole step is within 10 % of aiconfigurator's own, and its large parts are near."""

import pytest

from engine.costs import Datasheet
from engine.problem import make_problem
from engine.training import balanced_load
from tests.benchmarks.bench_serving import CLUSTER, MEASURED, served, sources_of_operators, theirs
from tests.costs.silicon import needs_tables
from tests.serving.samples import DECODE, DEEPSEEK, PREFILL

pytestmark = [needs_tables, pytest.mark.slow]


@pytest.mark.parametrize("step", [DECODE, PREFILL], ids=lambda step: step.phase)
@pytest.mark.parametrize("cost", [MEASURED, Datasheet()], ids=["network measured", "network as drawn"])
def test_a_whole_step_is_near(step, cost):
    problem = make_problem(balanced_load(DEEPSEEK), CLUSTER, DEEPSEEK, cost)
    figures = served("linear", problem, step, sources_of_operators()["operators measured"])
    reported = theirs(step)
    assert figures.seconds * 1e3 == pytest.approx(sum(reported.values()), rel=0.1)
    if cost is MEASURED:
        for kind in ("attention", "shared expert", "dispatch", "ffn", "combine"):
            # They count 61 MoE layers, of which three are dense.
            assert figures.parts[kind] * 1e3 == pytest.approx(reported[kind], rel=0.1), kind


def test_its_command_line_is_met_with_the_load_that_it_takes():
    """1589 tokens/s/GPU with a power law of load (the mean over the output, here half-way through it)."""
    reported = theirs(DECODE, "power_law")
    assert DECODE.tokens / sum(reported.values()) * 1e3 == pytest.approx(1589, rel=1e-3)
