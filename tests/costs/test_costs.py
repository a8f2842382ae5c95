"""Costs of computing and of collectives: datasheets, lines, and bounds that hold for any source."""

import time

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.cluster import Cluster, Node
from engine.costs import AlphaBeta, CostProfile, Datasheet, Line, fit_line
from engine.errors import InputError
from engine.network import Network
from engine.simulate.flows import all_to_all
from tests.cases.examples import tried
from tests.strategies import clusters, cost_models, make_gpu, make_model, seeds

GPU = make_gpu(flops=1e12, memory_bandwidth=1e11)
SLACK = 1 + 1e-12


def profile(**changes) -> CostProfile:
    fields = {
        "name": "test",
        "origin": "a test",
        "gemm": {"type-0": Line(alpha=1e-3, beta=1e-9)},
        "memory": {"type-0": Line(alpha=1e-4, beta=1e-8)},
    }
    return CostProfile(**(fields | changes))


@st.composite
def any_costs(draw):
    cluster = draw(clusters())
    return draw(cost_models(cluster)), cluster.gpus[0]


# Datasheet


@tried(150, *[st.integers(1, 10**6)] * 3, st.sampled_from(("fp32", "bf16", "fp8")), st.floats(0.1, 1), st.floats(0.1, 1))
def test_a_gemm_is_below_neither_roof_and_not_above_both(m, n, k, dtype, compute, memory):
    cost, width = Datasheet(compute_efficiency=compute, memory_efficiency=memory), {"fp32": 4, "bf16": 2, "fp8": 1}[dtype]
    arithmetic = 2 * m * n * k / ((0.5e12 if dtype == "fp32" else 1e12) * compute)
    moved = width * (m * k + n * k + m * n) / (1e11 * memory)
    assert cost.gemm(GPU, m, n, k, dtype) == pytest.approx(max(arithmetic, moved) + cost.launch, rel=1e-9)


def test_eight_bits_count_double_only_where_there_are_eight_bit_units_and_sources_say_what_was_assumed():
    assert "60 % of peak" in Datasheet().source and "a test" in AlphaBeta(profile()).source
    assert Datasheet(launch=1e-6).source != Datasheet().source
    with_units = GPU.model_copy(update={"flops_fp8": 2e12})
    cost, size = Datasheet(launch=0.0), 100_000
    once = cost.gemm(GPU, size, size, size, "fp16")
    assert cost.gemm(with_units, size, size, size, "fp8") == pytest.approx(once / 2)
    assert cost.gemm(GPU, size, size, size, "fp8") == pytest.approx(once)


# Tests of every source


@tried(60, any_costs(), st.lists(st.floats(0, 1e6), min_size=2, max_size=20))
def test_more_tokens_never_take_less_time_and_no_work_takes_none(case, tokens):
    cost, gpu = case
    tokens, model = np.sort([0.0, 1.0, *tokens]), make_model(1, 8, 2)
    for seconds in (cost.expert_ffn, cost.gate, cost.aggregate):
        times = seconds(gpu, tokens, model)
        assert np.all(np.diff(times) >= 0) and times[0] == 0 < times[tokens == 1][0]
        # Arrays are a convenience: each entry is on its own.
        np.testing.assert_array_equal(times, [float(seconds(gpu, token, model)) for token in tokens])
    assert cost.memory_pass(gpu, np.array([0.0, 0.0])).tolist() == [0.0, 0.0]


def test_a_gated_expert_has_a_third_matrix_and_lines_measured_in_a_crowd_are_put_back_to_one_rank_alone():
    alone, crowded = (AlphaBeta(profile(ranks=ranks, cores=2)) for ranks in (2, 8))
    assert float(crowded.memory_pass(GPU, 100.0)) == pytest.approx(float(alone.memory_pass(GPU, 100.0)) / 4)
    assert AlphaBeta(profile(ranks=1, cores=8)).profile.alone == 1
    cost = AlphaBeta(profile(gemm={"type-0": Line(alpha=0, beta=1e-9)}))
    gated, plain = (float(cost.expert_ffn(GPU, 10.0, make_model(1, 4, ffn_matrices=count))) for count in (3, 2))
    assert gated == pytest.approx(1.5 * plain)
    assert plain == pytest.approx(2 * 10 * 64 * 96 * 1e-9)


# Fitted lines


@tried(100, st.floats(0, 1e-2), st.floats(1e-12, 1e-6), st.lists(st.floats(1, 1e9), min_size=2, max_size=20, unique=True))
def test_a_planted_line_is_recovered(alpha, beta, sizes):
    sizes = np.array(sizes)
    seconds = alpha + beta * sizes
    line = fit_line(sizes, seconds)
    np.testing.assert_allclose(line.seconds(sizes), seconds, rtol=1e-6)
    assert line.error < 1e-6
    if sizes.max() > 10 * sizes.min() and seconds.max() > 2 * seconds.min() and alpha > 1e-3 * seconds.max():
        assert line.alpha == pytest.approx(alpha, rel=1e-3)
        assert line.beta == pytest.approx(beta, rel=1e-3)


@tried(100, seeds, st.integers(2, 20))
def test_no_fit_is_negative_and_its_error_is_its_own(seed, count):
    rng = np.random.default_rng(seed)
    sizes = 10 ** rng.uniform(0, 9, count)
    seconds = 10 ** rng.uniform(-6, 0, count)
    line = fit_line(sizes, seconds)
    assert line.alpha >= 0
    assert line.beta >= 0
    assert line.error == pytest.approx(np.mean(np.abs((line.alpha + line.beta * sizes) / seconds - 1)))

    def squares(alpha, beta):
        return np.sum(((alpha + beta * sizes) / seconds - 1) ** 2)

    # No line nearby is better in relative squares.
    best = squares(line.alpha, line.beta)
    for step in (0.9, 1.1):
        assert best <= squares(line.alpha * step, line.beta) * SLACK + 1e-12
        assert best <= squares(line.alpha, line.beta * step) * SLACK + 1e-12


def test_falling_times_have_no_negative_slope_and_one_size_or_no_time_is_no_line():
    assert fit_line([1, 10, 100], [3.0, 2.0, 1.0]).beta == 0
    with pytest.raises(InputError, match="at least two sizes"):
        fit_line([5, 5], [1.0, 2.0])
    with pytest.raises(InputError, match="1e-311 s is too short for a measured time"):
        fit_line([5, 6], [1.0, 1e-311])


# α–β profiles


def test_an_unknown_gpu_is_named_beside_the_known_ones():
    cost = AlphaBeta(profile(gemm={"B": Line(alpha=0, beta=1), "A": Line(alpha=0, beta=1)}))
    with pytest.raises(InputError, match=r"test has no times for type-0 \(it has A, B\); use the datasheet"):
        cost.gemm(GPU, 1, 1, 1, "bf16")
    with pytest.raises(InputError, match="no times for type-7"):
        cost.memory_pass(make_gpu(7), 1.0)


def test_a_gate_of_its_own_replaces_the_gemm_line():
    model = make_model(1, 4)
    plain, own = AlphaBeta(profile()), AlphaBeta(profile(gate={"type-0": Line(alpha=7.0, beta=0)}))
    assert float(plain.gate(GPU, 10.0, model)) == pytest.approx(1e-3 + 10 * 4 * 64 * 1e-9)
    assert float(own.gate(GPU, 10.0, model)) == 7.0
    with pytest.raises(InputError, match="type-3"):
        own.gate(make_gpu(3), 10.0, model)


def test_a_measured_network_replaces_the_drawn_fabric_only():
    cards = (make_gpu(), make_gpu())
    pair = Node(name="n", gpus=cards, link_bandwidth=5e6, link_latency=1e-5)
    cluster = Cluster(name="three", nodes=(pair, Node(name="single", gpus=cards[:1])))
    drawn = AlphaBeta(profile()).network(cluster)
    assert drawn.send.tolist() == Network.of(cluster).send.tolist() == [1e6, 1e6, 1e6]
    measured = AlphaBeta(profile(network=Line(alpha=2e-4, beta=1e-7))).network(cluster)
    # Half of the bytes of a GPU of the pair in an all-to-all takes the link, so its port needs half the rate for the rest.
    assert measured.send.tolist() == measured.receive.tolist() == pytest.approx([5e6, 5e6, 1e7])
    assert measured.latency == 2e-4
    assert (measured.link.tolist(), measured.link_latency.tolist()) == ([5e6, 5e6, 0], [1e-5, 1e-5, 0])
    # Between GPUs that links join the links were measured.
    joined = AlphaBeta(profile(network=Line(alpha=2e-4, beta=1e-7))).network(Cluster(name="two", nodes=(pair,)))
    assert (joined.link.tolist(), joined.link_latency.tolist()) == (pytest.approx([1e7, 1e7]), [2e-4, 2e-4])
    assert joined.send.tolist() == [1e6, 1e6]


# Processor sharing


jobs = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 10.0), st.just(1.0)), min_size=1, max_size=9)


@tried(100, jobs, st.integers(1, 9))
def test_shared_processors_equal_a_naive_simulation(work, cores):
    together = AlphaBeta(profile(ranks=9, cores=cores)).together(np.array(work))
    left, ends, now = {job: amount for job, amount in enumerate(work) if amount > 0}, [0.0] * len(work), 0.0
    while left:
        least = min(left.values())
        now += least * max(1.0, len(left) / cores)
        left = {job: amount - least for job, amount in left.items()}
        for job in [job for job, amount in left.items() if amount <= 1e-15]:
            ends[job] = now
            del left[job]
    np.testing.assert_allclose(together, ends, rtol=1e-9, atol=1e-12)


@tried(100, jobs, jobs)
def test_layers_share_nothing_and_processors_enough_for_all_change_nothing(first, second):
    both = np.array(list(zip(first, second, strict=False))).T
    cost = AlphaBeta(profile(ranks=9, cores=2))
    np.testing.assert_array_equal(cost.together(both), [cost.together(both[0]), cost.together(both[1])])
    for enough in (AlphaBeta(profile(ranks=3, cores=3)), Datasheet()):
        assert enough.together(both).tolist() == both.tolist()


COST = Datasheet()
CLOSE = 1e-7


def nodes_of(counts, link=None, link_latency=0.0, latency=0.0, send=1e6) -> Cluster:
    links, card = {"link_bandwidth": link, "link_latency": link_latency}, make_gpu(send=send)
    nodes = [Node(name=f"node-{index}", gpus=(card,) * count, **links) for index, count in enumerate(counts)]
    return Cluster(name="test", latency=latency, nodes=nodes)


# All-to-all


@tried(150, clusters(least=1, most=7), st.floats(1.0, 1e7), st.data())
def test_a_uniform_all_to_all_takes_what_the_simulation_says(cluster, size, data):
    cost = data.draw(cost_models(cluster))
    network = cost.network(cluster)
    traffic = np.full((network.gpus, network.gpus), size / network.gpus)
    expected = all_to_all("concurrent", None, traffic, network).seconds
    assert float(cost.all_to_all(cluster, size)) == pytest.approx(expected, rel=CLOSE)


# All-reduce


def ring_step_by_step(hops: list[tuple[float, float]], size: float) -> float:
    """A ring all-reduce in 2 (P-1) steps, each of which waits for the slowest hop (latency, bandwidth) to pass a part."""
    parts = len(hops)
    return sum(max(start + size / parts / rate for start, rate in hops) for _ in range(2 * (parts - 1)))


@pytest.mark.parametrize("rates", [(1e6, 1e6), (1e6, 5e5, 8e5), (4e5,) * 7, (1e6, 1e6, 1e6, 1e6, 2e5)])
def test_without_start_up_a_ring_of_single_gpus_is_the_slowest_hop(rates):
    cluster = Cluster(
        name="test", nodes=tuple(Node(name=f"node-{at}", gpus=(make_gpu(send=rate),)) for at, rate in enumerate(rates))
    )
    hops = [(0.0, min(rate, rates[(at + 1) % len(rates)])) for at, rate in enumerate(rates)]
    assert float(COST.all_reduce(cluster, 6e6)) == pytest.approx(ring_step_by_step(hops, 6e6))


@pytest.mark.parametrize(
    ("cluster", "size", "wanted"),
    [
        # A large one starts up at every step of the ring, a small one on many nodes takes the tree.
        (nodes_of((1,) * 4, latency=0.01), 1e8, ring_step_by_step([(0.01, 1e6)] * 4, 1e8)),
        (nodes_of((1,) * 64, latency=0.01), 1.0, 2 * 6 * 0.01 + 2e-6),
        # A node's GPUs give it their ports together.
        (nodes_of((4, 4), link=1e9), 8e6, 2 * 7 / 8 * 8e6 / 4e6),
        (nodes_of((4, 4), link=1e6), 8e6, 2 * 7 / 8 * 8e6 / 1e6),
        # Without links every hop inside a node takes the GPU's own port too.
        (nodes_of((4, 4)), 8e6, 2 * 7 / 8 * 8e6 / 1e6),
        # Inside one node the fabric does not count.
        (nodes_of((4,), link=1e7, link_latency=1e-3, latency=9.0), 8e6, 6e-3 + 1.5 * 0.8),
        # A ring of four passes a part on six times: four times over a link, twice over the fabric.
        (nodes_of((2, 2), link=1e9, link_latency=1e-3, latency=1e-1), 1e9, 4e-3 + 2e-1 + 1.5 * 1e9 / 2e6),
    ],
)
def test_an_all_reduce_by_hand(cluster, size, wanted):
    assert float(COST.all_reduce(cluster, size)) == pytest.approx(wanted)


@tried(150, clusters(least=1, most=7), st.floats(1.0, 1e7))
def test_no_all_reduce_beats_what_must_leave_the_slowest_gpu(cluster, size):
    network, gpus = Network.of(cluster), len(cluster.gpus)
    way_out = np.where(network.link > 0, network.link, 0) + np.minimum(network.send, network.receive)
    # Patarasuk and Yuan, theorem 1, with all that a GPU could ever send through.
    least = 2 * (gpus - 1) / gpus * size / way_out.max()
    assert float(COST.all_reduce(cluster, size)) >= least * (1 - 1e-12)


# Both


both = pytest.mark.parametrize("collective", [COST.all_to_all, COST.all_reduce], ids=["all_to_all", "all_reduce"])


@both
@tried(60, clusters(least=1), st.lists(st.floats(0, 1e8), min_size=1, max_size=8))
def test_more_bytes_never_take_less_time_and_none_take_none(collective, cluster, sizes):
    sizes = np.sort(sizes)
    seconds = collective(cluster, sizes)
    assert np.all(np.diff(seconds) >= 0)
    np.testing.assert_array_equal(seconds, [float(collective(cluster, size)) for size in sizes])
    assert seconds.shape == sizes.shape
    assert float(collective(cluster, 0.0)) == 0
    assert np.all((seconds[sizes > 1e-9] > 0) == (len(cluster.gpus) > 1))  # one GPU talks to nobody


@both
def test_many_sizes_on_512_gpus_are_cheap(collective):
    cluster = nodes_of((8,) * 64, link=1e9, link_latency=1e-6, latency=1e-5)
    sizes = np.linspace(1, 1e9, 10_000)
    begin = time.process_time()
    collective(cluster, sizes)
    assert time.process_time() - begin < 0.5
