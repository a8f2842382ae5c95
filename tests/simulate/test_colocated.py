"""Two models on the same GPUs: the order of computation, the waits, closed forms, and the bound."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from engine.errors import InputError
from engine.network import Network, off_diagonal
from engine.plan import SendOrder
from engine.simulate.colocated import ExpertSeconds, colocated_bound, colocated_timeline, layer_weight
from engine.simulate.events import EventLog
from engine.simulate.serving import bound_of_two_batches, log_two_batches
from engine.simulate.work import Work
from engine.timeline import COLUMNS
from tests.cases.examples import examples, tried
from tests.cases.flows import fabric, schedule_for
from tests.strategies import networks, seeds

MODES = ("matched", "sequential", "concurrent")
STEPS = ("gate", "ffn", "aggregate")
ROUND_OFF = 1e-8


def orders(mode: str, traffic: tuple, network: Network, seed: int) -> SendOrder:
    """A send order for dispatch and combine float64[layer, src, dst]."""
    if mode == "concurrent":
        return SendOrder(mode=mode)
    dispatch, combine = (tuple(schedule_for(mode, matrix, network, seed) for matrix in part) for part in traffic)
    return SendOrder(mode=mode, dispatch=dispatch, combine=combine)


def model(rng: np.random.Generator, network: Network, layers: int, busy: float = 1.0) -> tuple[dict, tuple]:
    """Random compute seconds and traffic; computation and transfers weigh about the same, some of each is missing."""
    gpus = network.gpus
    compute = {
        step: rng.exponential(1e-3, (layers, gpus)) * (rng.random((layers, gpus)) < 0.9) * rng.integers(0, 2) for step in STEPS
    }
    dispatch = rng.exponential(500.0, (layers, gpus, gpus)) * (rng.random((layers, gpus, gpus)) < busy)
    combine = dispatch.transpose(0, 2, 1) if rng.random() < 0.7 else rng.exponential(500.0, dispatch.shape)
    return compute, (dispatch, combine)


@st.composite
def cases(draw, most: int = 4, modes=MODES):
    """The arguments of `colocated_timeline` of two random models."""
    network, rng = draw(networks(most=most)), np.random.default_rng(draw(seeds))
    layers = draw(st.integers(1, 2))
    (compute_a, traffic_a), (compute_b, traffic_b) = (
        model(rng, network, layers, draw(st.sampled_from((0.0, 0.5, 1.0)))) for _ in "ab"
    )
    order_a, order_b = (
        orders(draw(st.sampled_from(modes)), traffic, network, seed) for seed, traffic in enumerate((traffic_a, traffic_b))
    )
    return compute_a, compute_b, traffic_a, traffic_b, order_a, order_b, network


def total(events: pd.DataFrame) -> float:
    return float(events["end"].max()) if len(events) else 0.0


def bound_of(case: tuple) -> float:
    return colocated_bound(*case[:4], case[6])


@tried(100, cases())
def test_every_rule_of_the_pipeline_and_the_bound(case):
    """Walks through the events: one computation at a time and in order, every wait kept, nobody waits without cause."""
    compute_a, compute_b, traffic_a, traffic_b, _, _, network = case
    events = colocated_timeline(*case)
    assert tuple(events.columns) == COLUMNS and bound_of(case) <= total(events) * (1 + ROUND_OFF)
    compute, traffic = (compute_a, compute_b), (traffic_a, traffic_b)

    def ends_of(layer: int, kind: str, model: int) -> pd.DataFrame:
        return events[(events["layer"] == layer) & (events["kind"] == kind) & (events["model"] == model)]

    lane, checked_events = np.zeros(network.gpus), 0
    for layer in range(len(traffic_a[0])):
        arrived, fed = {}, {}
        for step, model_ in (("gate", 0), ("gate", 1), ("ffn", 0), ("ffn", 1), ("aggregate", 0), ("aggregate", 1)):
            before = {"gate": None, "ffn": "dispatch", "aggregate": "combine"}[step]
            ready = arrived.get((before, model_), 0.0)
            if before:
                flows = ends_of(layer, before, model_)
                which = ("dispatch", "combine").index(before)
                moved = np.zeros((network.gpus, network.gpus))
                np.add.at(moved, (flows["resource"], flows["peer"]), flows["bytes"])
                np.testing.assert_allclose(moved, off_diagonal(traffic[model_][which][layer]), rtol=1e-12)
                assert flows["start"].min() == pytest.approx(fed[before, model_]) if len(flows) else True
                ready = max(fed[before, model_], flows["end"].max() if len(flows) else 0.0)
                checked_events += len(flows)
            start, seconds = np.maximum(lane, ready), compute[model_][step][layer]
            done = ends_of(layer, step, model_)
            some = np.flatnonzero(seconds > 0)
            assert done["resource"].tolist() == some.tolist()
            np.testing.assert_allclose(done["start"], start[some], rtol=1e-12)
            np.testing.assert_allclose(done["end"], (start + seconds)[some], rtol=1e-12)
            lane, checked_events = start + seconds, checked_events + len(done)
            fed[{"gate": "dispatch", "ffn": "combine"}.get(step), model_] = lane.max()
    assert checked_events == len(events) and set(events["model"]) <= {0, 1}
    assert all(events.loc[events["stream"] == "compute", "peer"] == -1)


ALL_TO_ALLS = (("dispatch", 0), ("dispatch", 1), ("combine", 0), ("combine", 1))


@tried(60, cases(), st.sets(st.sampled_from(ALL_TO_ALLS[1:])))
def test_what_goes_in_turn_starts_when_the_one_before_has_ended_and_no_later(case, turns):
    feeds = {"dispatch": "gate", "combine": "ffn"}
    compute = tuple({step: seconds + 1e-4 for step, seconds in of_model.items()} for of_model in case[:2])
    events = colocated_timeline(*compute, *case[2:], in_turn=frozenset(turns))
    for layer in range(len(case[2][0])):
        ended = 0.0
        for kind, model_ in ALL_TO_ALLS:
            of_model = events[(events["layer"] == layer) & (events["model"] == model_)]
            ready = of_model.loc[of_model["kind"] == feeds[kind], "end"].max()
            sends = of_model[of_model["kind"] == kind]
            start = max(ready, ended) if (kind, model_) in turns else ready
            assert not len(sends) or sends["start"].min() == pytest.approx(start)
            ended = sends["end"].max() if len(sends) else start


@tried(60, cases(modes=("matched",)))
def test_the_bound_is_met_where_one_model_has_no_traffic(case):
    compute_a, compute_b, traffic_a, traffic_b, order_a, _, network = case
    linked = np.zeros(network.gpus)
    send = np.full(network.gpus, 1e6)
    network = replace(network, send=send, receive=send, link=linked, latency=0.0, link_latency=linked)
    silent = tuple(np.zeros_like(traffic) for traffic in traffic_b)
    plain = SendOrder(mode="concurrent")
    order_a = orders("matched", traffic_a, network, 0)
    for arguments in (
        (compute_a, compute_b, traffic_a, silent, order_a, plain, network),
        (compute_b, compute_a, silent, traffic_a, plain, order_a, network),
    ):
        assert total(colocated_timeline(*arguments)) == pytest.approx(bound_of(arguments), rel=ROUND_OFF)


def test_the_bound_counts_both_dispatches_at_a_port_and_releases():
    """GPU 0 sends 4 s of a and, from second 1 on, 3 s of b; only then come the experts of b."""
    network = fabric([1.0, 1.0])
    nothing, both = np.zeros((1, 2)), np.zeros((2, 1, 2, 2))
    both[:, 0, 0, 1] = 4.0, 3.0
    silent = np.zeros((1, 2, 2))
    compute_a = {"gate": nothing, "ffn": nothing, "aggregate": nothing}
    compute_b = {"gate": nothing + 1.0, "ffn": nothing + 10.0, "aggregate": nothing}
    assert colocated_bound(compute_a, compute_b, (both[0], silent), (both[1], silent), network) == 4 + 3 + 10
    # Traffic of b alone: nothing moves before its gate is through.
    assert colocated_bound(compute_a, compute_b, (silent, silent), (both[1], silent), network) == 1 + 3 + 10
    # The combine of a starts when the experts of a end, however idle the network was.
    compute_a["ffn"] = nothing + 20.0
    assert colocated_bound(compute_a, compute_b, (silent, both[0]), (silent, silent), network) == 1 + 20 + 10
    compute_b["ffn"] = nothing
    assert colocated_bound(compute_a, compute_b, (silent, both[0]), (silent, silent), network) == 1 + 20 + 4


def test_the_bound_lets_all_to_alls_of_other_gpus_run_side_by_side():
    """The combine of a needs not wait for the dispatch of b, which table 2 serves first."""
    network, nothing, silent = fabric([1.0] * 4), np.zeros((1, 4)), np.zeros((1, 4, 4))
    compute = dict.fromkeys(STEPS, nothing)
    combine_a, dispatch_b = silent.copy(), silent.copy()
    combine_a[0, 0, 1], dispatch_b[0, 2, 3] = 4.0, 7.0
    case = (compute, compute, (silent, combine_a), (dispatch_b, silent))
    plain = SendOrder(mode="concurrent")
    assert colocated_bound(*case, network) == total(colocated_timeline(*case, plain, plain, network)) == 7.0


def table_2(times: dict[str, float]) -> float:
    """Equation 4, G^a of the next layer included, where no two all-to-alls overlap; |X + Y| is then |X| after |Y|."""
    t = times
    end_na = t["Na"]
    end_fa = max(t["Gb"], end_na) + t["Fa"]
    end_nb = max(t["Gb"], end_na) + t["Nb"]
    end_fb = max(end_fa, end_nb) + t["Fb"]
    end_ca = max(end_fa, end_nb) + t["Ca"]
    end_aa = max(end_fb, end_ca) + t["Aa"]
    end_cb = max(end_fb, end_ca) + t["Cb"]
    return max(end_aa, end_cb) + t["Ab"] + t["Ga"]


def test_table_2_where_no_two_collectives_overlap():
    """Equal GPUs. Drawn times of which those without an overlap are kept; the maxima must go both ways."""
    rng = np.random.default_rng(0)
    network, kept = fabric([1.0] * 3), 0
    ways = set()
    draws = examples(200, 80)
    for _ in range(draws):
        compute = {name: float(rng.exponential()) for name in ("Ga", "Gb", "Fa", "Fb", "Aa", "Ab")}
        traffic = {name: rng.exponential(0.3, (1, 3, 3)) * (rng.random() < 0.5) for name in ("Na", "Nb", "Ca", "Cb")}
        seconds = {name: network.bound(matrices[0]) for name, matrices in traffic.items()}
        per_model = [
            {step: np.full((1, 3), compute[letter + which]) for step, letter in zip(STEPS, "GFA", strict=True)}
            for which in "ab"
        ]
        moved = [(traffic["N" + which], traffic["C" + which]) for which in "ab"]
        order = [orders("matched", pair, network, 0) for pair in moved]
        events = colocated_timeline(*per_model, *moved, *order, network)
        spans = events[events["stream"] == "network"].groupby(["model", "kind"], observed=True)
        spans = spans.agg(start=("start", "min"), end=("end", "max")).sort_values("start")
        if np.any(spans["start"].to_numpy()[1:] < spans["end"].to_numpy()[:-1]):
            continue
        kept += 1
        t = compute | seconds
        ways.add((t["Gb"] >= t["Na"], t["Fa"] >= t["Nb"], t["Fb"] >= t["Ca"], t["Aa"] >= t["Cb"]))
        assert total(events) == pytest.approx(table_2(t), rel=ROUND_OFF)
        assert bound_of((*per_model, *moved, None, None, network)) <= total(events) * (1 + ROUND_OFF)
    assert kept > draws / 5 and len(ways) >= 4


def test_a_shared_order_and_unequal_layers_are_refused():
    network, rng = fabric([1.0, 1.0]), np.random.default_rng(0)
    (compute_a, traffic_a), (compute_b, traffic_b) = (model(rng, network, layers) for layers in (1, 2))
    plain, shared = SendOrder(mode="concurrent"), orders("shared", traffic_a, network, 0)
    with pytest.raises(InputError, match="shared order"):
        colocated_timeline(compute_a, compute_a, traffic_a, traffic_a, plain, shared, network)
    with pytest.raises(AssertionError, match="as many layers"):
        colocated_timeline(compute_a, compute_b, traffic_a, traffic_b, plain, plain, network)


def expert_seconds(rng: np.random.Generator, gpus: int, experts: int) -> ExpertSeconds:
    return ExpertSeconds(rng.random(gpus) * 0.5, rng.random(gpus) * 0.5, *rng.random((3, gpus, experts)))


def test_layer_weight_is_table_2_of_every_triple():
    """If a GPU sends as much as it receives, two all-to-alls that overlap take as long as one after the other."""
    rng = np.random.default_rng(1)
    a, b = (replace(seconds, receive=seconds.send) for seconds in (expert_seconds(rng, 3, 4), expert_seconds(rng, 3, 5)))
    weight = layer_weight(a, b)
    assert weight.shape == (3, 4, 5)
    for gpu, of_a, of_b in np.ndindex(weight.shape):
        times = {"Ga": a.gate[gpu], "Gb": b.gate[gpu], "Aa": a.aggregate[gpu], "Ab": b.aggregate[gpu]}
        times |= {"Fa": a.ffn[gpu, of_a], "Fb": b.ffn[gpu, of_b]}
        times |= {"Na": a.send[gpu, of_a], "Nb": b.send[gpu, of_b]}
        assert weight[gpu, of_a, of_b] == pytest.approx(table_2(times | {"Ca": times["Na"], "Cb": times["Nb"]}), rel=1e-12)


def test_layer_weight_of_one_model_alone_and_of_computation_alone():
    rng = np.random.default_rng(2)
    a, b = expert_seconds(rng, 4, 4), expert_seconds(rng, 4, 4)
    nothing = ExpertSeconds(np.zeros(4), np.zeros(4), *np.zeros((3, 4, 4)))
    alone = a.gate[:, None] + a.aggregate[:, None] + a.ffn + 2 * np.maximum(a.send, a.receive)
    np.testing.assert_allclose(layer_weight(a, nothing), np.repeat(alone[:, :, None], 4, axis=2))
    np.testing.assert_allclose(layer_weight(nothing, a), np.repeat(alone[:, None, :], 4, axis=1))
    quiet = [replace(seconds, send=0 * seconds.send, receive=0 * seconds.receive) for seconds in (a, b)]
    busy = [(seconds.gate + seconds.aggregate)[:, None] + seconds.ffn for seconds in quiet]
    np.testing.assert_allclose(layer_weight(*quiet), busy[0][:, :, None] + busy[1][:, None, :])


CONCURRENT = SendOrder(mode="concurrent")


def run(work: Work, beside: float, network: Network, order: SendOrder = CONCURRENT) -> pd.DataFrame:
    log = EventLog()
    log_two_batches(log, work, np.full(network.gpus, beside), order, network)
    return log.frame()


def pair(seconds: float, layers: int = 3, **compute: float) -> tuple[Work, Network]:
    """Two GPUs that exchange for so many seconds in every all-to-all and compute alike."""
    traffic = np.tile(np.array([[0.0, seconds], [seconds, 0.0]]), (layers, 1, 1))
    steps = {step: np.full((layers, 2), compute.get(step, 0.0)) for step in STEPS}
    return Work(traffic, traffic, steps), fabric([1.0] * 2)


@pytest.mark.parametrize(
    ("exchange", "beside", "compute", "wanted"),
    [(0.0, 2.0, {"gate": 1.0, "ffn": 3.0, "aggregate": 0.5}, 2 * 3 * (2 + 1 + 3 + 0.5)), (1.5, 0.0, {}, 2 * 3 * 2 * 1.5)],
    ids=["without traffic one after the other", "without computation the network never rests"],
)
def test_two_batches_meet_their_bound_where_nothing_overlaps(exchange, beside, compute, wanted):
    work, network = pair(exchange, **compute)
    assert run(work, beside, network).end.max() == pytest.approx(wanted)
    assert bound_of_two_batches(work, np.full(network.gpus, beside), network) == pytest.approx(wanted)


def test_all_that_travels_in_the_middle_hides_under_computation_as_long():
    """Attention 2, experts 2, an all-to-all 2: after the first attention a GPU always has something to compute, until at the
    end the last combine of the second batch has nothing to hide under."""
    work, network = pair(2.0, ffn=2.0)
    assert run(work, 2.0, network).end.max() == pytest.approx(3 * 2 * (2 + 2) + 2)


@tried(60, networks(), seeds, st.sampled_from(MODES), st.integers(1, 3), st.sampled_from((0.0, 1e-3)))
def test_rules_and_bound_hold_on_any_network(network, seed, mode, layers, beside):
    rng = np.random.default_rng(seed)
    compute, traffic = model(rng, network, layers)
    work = Work(*traffic, compute)
    events = run(work, beside, network, orders(mode, traffic, network, seed))
    bound = bound_of_two_batches(work, np.full(network.gpus, beside), network)
    total = events.end.max() if len(events) else 0.0
    assert total >= bound * (1 - ROUND_OFF)
    # A GPU computes one thing at a time, and exchanges take turns.
    turns = events[events.stream == "network"].groupby(["kind", "layer", "model"], observed=True)
    turns = turns.agg(start=("start", "min"), end=("end", "max")).sort_values(["start", "end"])
    assert np.all(turns.start.to_numpy()[1:] >= turns.end.to_numpy()[:-1] - ROUND_OFF)
    for _, own in events[events.stream == "compute"].groupby("resource"):
        spans = own.sort_values(["start", "end"])
        assert np.all(spans.start.to_numpy()[1:] >= spans.end.to_numpy()[:-1] - ROUND_OFF)
    # A step that waits for an all-to-all waits for its end everywhere, and the work before an all-to-all ends everywhere first.
    times = events.groupby(["kind", "layer", "model"], observed=True).agg(first=("start", "min"), last=("end", "max"))
    for before, after in (("gate", "dispatch"), ("dispatch", "ffn"), ("ffn", "combine"), ("combine", "aggregate")):
        for layer in range(layers):
            for batch in (0, 1):
                if {(before, layer, batch), (after, layer, batch)} <= set(times.index):
                    earlier, later = times.loc[(before, layer, batch)], times.loc[(after, layer, batch)]
                    assert later["first"] >= earlier["last"] - ROUND_OFF
