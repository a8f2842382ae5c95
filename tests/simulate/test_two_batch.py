"""Two batches of one model: what hides under what, closed forms, and the bound."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.network import Network
from engine.plan import SendOrder
from engine.simulate.events import EventLog
from engine.simulate.serving import bound_of_two_batches, log_two_batches
from engine.simulate.work import Work
from tests.cases.examples import examples
from tests.simulate.test_colocated import MODES, model, orders
from tests.simulate.test_flows import fabric
from tests.strategies import networks, seeds

pytestmark = pytest.mark.slow

ROUND_OFF = 1e-8
STEPS = ("gate", "ffn", "aggregate")
CONCURRENT = SendOrder(mode="concurrent")


def run(work: Work, beside: float, network: Network, order: SendOrder = CONCURRENT) -> pd.DataFrame:
    log = EventLog()
    log_two_batches(log, work, beside, order, network)
    return log.frame()


def pair(seconds: float, layers: int = 3, **compute: float) -> tuple[Work, Network]:
    """Two GPUs that exchange for so many seconds in every all-to-all and compute alike."""
    traffic = np.tile(np.array([[0.0, seconds], [seconds, 0.0]]), (layers, 1, 1))
    steps = {step: np.full((layers, 2), compute.get(step, 0.0)) for step in STEPS}
    return Work(traffic, traffic, steps), fabric([1.0] * 2)


def test_without_traffic_both_batches_compute_one_after_the_other():
    work, network = pair(0.0, gate=1.0, ffn=3.0, aggregate=0.5)
    events = run(work, 2.0, network)
    assert events.end.max() == pytest.approx(2 * 3 * (2 + 1 + 3 + 0.5))
    assert bound_of_two_batches(work, 2.0, network) == pytest.approx(events.end.max())


def test_without_computation_the_network_never_rests():
    work, network = pair(1.5)
    events = run(work, 0.0, network)
    assert events.end.max() == pytest.approx(2 * 3 * 2 * 1.5)
    assert bound_of_two_batches(work, 0.0, network) == pytest.approx(events.end.max())


def test_all_that_travels_in_the_middle_hides_under_computation_as_long():
    """Attention 2, experts 2, an all-to-all 2: after the first attention a GPU always has something to compute, until at the
    end the last combine of the second batch has nothing to hide under."""
    work, network = pair(2.0, ffn=2.0)
    assert run(work, 2.0, network).end.max() == pytest.approx(3 * 2 * (2 + 2) + 2)


def test_a_combine_hides_under_the_next_layers_attention():
    work, network = pair(1.0, layers=2, ffn=4.0)
    events = run(work, 4.0, network)
    combine = events[(events.kind == "combine") & (events.layer == 0) & (events.model == 1)]
    attention = events[(events.kind == "dense") & (events.layer == 1) & (events.model == 0)]
    assert attention.start.min() <= combine.start.min() < combine.end.max() <= attention.end.max()


@settings(deadline=None, max_examples=examples(60))
@given(networks(), seeds, st.sampled_from(MODES), st.integers(1, 3), st.sampled_from((0.0, 1e-3)))
def test_rules_and_bound_hold_on_any_network(network, seed, mode, layers, beside):
    rng = np.random.default_rng(seed)
    compute, traffic = model(rng, network, layers)
    work = Work(*traffic, compute)
    events = run(work, beside, network, orders(mode, traffic, network, seed))
    bound = bound_of_two_batches(work, beside, network)
    total = events.end.max() if len(events) else 0.0
    assert total >= bound * (1 - ROUND_OFF)
    # A GPU computes one thing at a time, and exchanges take turns.
    turns = events[events.stream == "network"].groupby(["kind", "layer", "model"], observed=True)
    turns = turns.agg(start=("start", "min"), end=("end", "max")).sort_values(["start", "end"])
    assert np.all(turns.start.to_numpy()[1:] >= turns.end.to_numpy()[:-1] - ROUND_OFF)
    for _, own in events[events.stream == "compute"].groupby("resource"):
        spans = own.sort_values(["start", "end"])
        assert np.all(spans.start.to_numpy()[1:] >= spans.end.to_numpy()[:-1] - ROUND_OFF)
    # What waits for an all-to-all waits until it has ended everywhere, and what it waits for has ended before.
    times = events.groupby(["kind", "layer", "model"], observed=True).agg(first=("start", "min"), last=("end", "max"))
    for before, after in (("gate", "dispatch"), ("dispatch", "ffn"), ("ffn", "combine"), ("combine", "aggregate")):
        for layer in range(layers):
            for batch in (0, 1):
                if {(before, layer, batch), (after, layer, batch)} <= set(times.index):
                    earlier, later = times.loc[(before, layer, batch)], times.loc[(after, layer, batch)]
                    assert later["first"] >= earlier["last"] - ROUND_OFF
