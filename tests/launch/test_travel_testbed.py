"""Tokens that spread inside emulated nodes: they take as long as predicted, and are spread while others still enter."""

import numpy as np
import pytest

from engine.launch.places.testbed import Testbed
from engine.launch.rank.instructions import Tiers
from engine.launch.running.local import run_here
from engine.result import never
from engine.systems.base import silent
from tests.launch.test_local import LAYERS, MODEL, UNEVEN, of, plan_for, recording
from tests.launch.test_testbed import MBIT, needs_testbed, nothing_left
from tests.launch.test_tiers import TWO_NODES
from tests.launch.test_travel import hold_bytes, prepared, travelling

__all__ = ["nothing_left"]  # a fixture of all tests here too

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.slow]

PORT, LINK = 10 * MBIT, 40 * MBIT
LAUNCHES = 3
"""How often it is tried at most."""


@needs_testbed
def test_a_row_a_node_takes_as_long_as_predicted(tmp_path):
    """A machine with other work makes passes longer, and then the next launch may fare better."""
    trace, model = recording(900), MODEL.model_copy(update={"d_model": 512})
    concurrent = plan_for(trace, "concurrent", UNEVEN, model)
    plans = [travelling(concurrent, "node"), travelling(concurrent, "node", "fp8", "bf16")]
    launch = prepared(*plans, trace=trace, model=model, repeats=3)
    tiers = Tiers(node=(0, 0, 1, 1), port=(PORT,) * 4, link=(LINK,) * 4)
    launch = launch.on_testbed(Testbed(np.full(4, PORT), tiers=tiers))
    seen = []
    while len(seen) < LAUNCHES and not (seen and abs(np.log(seen[-1])).max() <= np.log(1.15)):
        runs = run_here(launch, tmp_path / f"run {len(seen)}", never, silent).runs
        hold_bytes(launch, runs, TWO_NODES)
        assert all(run.difference.share <= 1 for run in runs)
        seen.append([min(run.totals) / run.predicted.total for run in runs])
    assert abs(np.log(seen[-1])).max() <= np.log(1.15), seen
    in_fp32, in_8_bits = (run.predicted.total for run in runs)
    assert in_8_bits < 0.6 * in_fp32
    for layer in range(LAYERS):
        sends = of(runs[0].measured, "dispatch", layer)
        steps = sends.groupby(sends["resource"] // 2 == sends["peer"] // 2)
        assert steps["start"].max()[True] > steps["end"].min()[False], "what is spread has entered before"
        assert steps["start"].min()[True] < steps["end"].max()[False], "while others enter"
