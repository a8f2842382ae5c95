"""AIConfigurator's measured kernels as costs: GEMMs, fused experts, and sizes between the measured ones."""

from itertools import product

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from engine.catalogue import cluster_presets, gpu, gpu_types, model_presets, packaged
from engine.cluster import Cluster, Node
from engine.compare.trust.collectives import skew_errors
from engine.costs import AlphaBeta, CostProfile, Datasheet, GemmTimes, Line, MeasuredTimes, Profiled, Silicon, silicon
from engine.costs.fused_experts import Fit, FusedExperts, KernelTable, busiest_gpu, kernel_rows, kernel_table, work_of_experts
from engine.costs.gemm_table import REACH, GemmTable
from engine.costs.scaled import Scaled
from engine.costs.silicon import GEMM_DTYPES, LEFT_OUT_ERROR, MACHINES, collective_table, gemm_table, measured_counts
from engine.errors import InputError
from engine.simulate.flows import all_to_all
from tests.cases.examples import tried
from tests.cases.refusals import refusal
from tests.costs.silicon import needs_tables
from tests.costs.source_errors import left_out_errors
from tests.serving.samples import DEEPSEEK, QWEN, h200
from tests.strategies import make_gpu

KIMI = DEEPSEEK.model_copy(update={"name": "Kimi-K2.5", "experts": 384, "dtype": "bf16", "expert_bits": 4.5})
COST = Silicon()
FOLDERS = sorted({machine.folder for machine in MACHINES.values()})
measured_gpus = pytest.mark.parametrize("kind", MACHINES)


def one_node(kind: str, count: int, links: float | None = 0.0) -> Cluster:
    """GPUs on the links that were measured, or on others."""
    links = MACHINES[kind].link_bandwidth if links == 0.0 else links
    node = Node(name="node", gpus=(gpu(kind),) * count, link_bandwidth=links, link_latency=5e-6)
    return Cluster(name="one node", nodes=(node,), latency=1e-5)


# Units


@needs_tables
@measured_gpus
def test_no_gemm_beats_the_chip_and_large_ones_come_near_it(kind):
    for dtype in ("bf16", "fp8"):
        if (table := gemm_table(MACHINES[kind].folder, GEMM_DTYPES[dtype])) is None:
            continue
        work = 2 * table.m[:, None, None] * table.n[:, None] * table.k
        share = work / table.seconds / gpu(kind).flops(dtype)
        assert share.max() < 1
        assert share.max() > 0.5
        assert table.seconds.min() > 1e-6  # a launch alone takes over a microsecond


@needs_tables
@measured_gpus
@pytest.mark.parametrize("operation", ["all_to_all", "all_reduce"])
def test_no_collective_beats_the_links(kind, operation):
    links = MACHINES[kind].link_bandwidth
    for count in measured_counts(MACHINES[kind].folder):
        sizes, seconds = collective_table(MACHINES[kind].folder, operation, count)
        # Bytes that must leave each GPU: its parts for others, and of a sum that the switch makes at least the buffer once.
        leaves = sizes * ((count - 1) / count if operation == "all_to_all" else 1.0)
        share = leaves / seconds / links
        assert share.max() < 1
        # NVLink is used well. The L40S has PCIe, shared between GPUs, and its drivers go through the host.
        assert share[-1] > (0.02 if kind == "L40S" else 0.3)
        assert 1e-6 < seconds[0] < 1e-4


@needs_tables
@pytest.mark.parametrize("folder", FOLDERS)
def test_message_sizes_are_elements(folder):
    file = silicon.newest(folder, "comm/nccl", "nccl_perf.parquet")[0]
    rows = pq.read_table(file).to_pandas()
    rows["bytes"] = rows.message_size * rows.nccl_dtype.map({"half": 2, "int8": 1})
    large = rows[(rows.bytes == rows.bytes.max()) & (rows.op_name == "alltoall")]
    times = large.pivot(index="num_gpus", columns="nccl_dtype", values="latency")
    assert len(times) >= 2
    np.testing.assert_allclose(times["half"], times["int8"], rtol=0.25)


@needs_tables
def test_links_are_those_of_the_package_and_of_the_catalogues_nodes():
    yaml = pytest.importorskip("yaml")
    for machine in MACHINES.values():
        text = (silicon._data_folder().parent / f"{machine.folder}.yaml").read_text()
        assert yaml.safe_load(text)["node"]["intra_node_bw"] == machine.link_bandwidth
    for preset in ("hgx-h100-8", "hgx-h200-8", "hgx-b200-8"):
        assert COST.lacks_network(cluster_presets()[preset].cluster) is None
    assert set(MACHINES) <= set(gpu_types())


# GEMMs


@needs_tables
@pytest.mark.parametrize("kind", ["A100-80", "H100", "H200", "B200", "L40S"])
def test_measured_gemms_are_met_but_where_more_rows_were_faster(kind):
    table = gemm_table(MACHINES[kind].folder, "bfloat16")
    for at, place in ((0, 0), (5, 9), (20, 3)):
        seconds = COST.gemm(gpu(kind), table.m, int(table.n[at]), int(table.k[place]), "bf16")
        measured = table.seconds[:, at, place]
        best = [measured[rows:].min() for rows in range(len(measured))]
        np.testing.assert_allclose(seconds, best, rtol=1e-12)
        assert np.isclose(seconds, measured, rtol=1e-12).any()


def test_a_power_law_is_interpolated_exactly():
    m, n, k = (2.0 ** np.arange(5) for _ in range(3))
    table = GemmTable(m, n, k, 3e-6 * m[:, None, None] ** 0.5 * n[:, None] * k**2)
    rows = np.array([1.0, 2.7, 16.0])
    np.testing.assert_allclose(table.over_rows(table.of_shape(3, 7), rows), 3e-6 * rows**0.5 * 3 * 49, rtol=1e-12)
    # Twice the rows or columns of the largest take twice as long; below the smallest nothing is faster.
    assert float(table.over_rows(table.of_shape(16, 1), 32)) == pytest.approx(2 * 3e-6 * 4 * 16)
    assert float(table.over_rows(table.of_shape(32, 1), 1)) == pytest.approx(2 * 3e-6 * 16)
    assert float(table.over_rows(table.of_shape(0.5, 1), 0.3)) == pytest.approx(3e-6)
    assert float(table.over_rows(table.of_shape(1, 1), 0)) == 0


@needs_tables
@tried(
    60,
    st.sampled_from(list(MACHINES)),
    st.lists(st.floats(0, 50_000), min_size=2, max_size=30),
    st.integers(8, 20_000),
    st.integers(8, 100_000),
)
def test_more_rows_never_take_less_time(kind, rows, n, k):
    seconds = COST.gemm(gpu(kind), np.sort(rows), n, k, "bf16")
    assert np.all(np.diff(seconds) >= -1e-12 * seconds[1:])


@needs_tables
def test_the_error_that_the_source_states_was_measured():
    worst = max(
        left_out_errors(table).mean()
        for folder in FOLDERS
        for dtype in ("bfloat16", "fp8")
        if (table := gemm_table(folder, dtype)) is not None
    )
    assert abs(worst - LEFT_OUT_ERROR) < 0.005
    assert f"{LEFT_OUT_ERROR:.0%}" in COST.source


@needs_tables
def test_larger_gemms_are_several_of_the_largest_and_sixteen_bit_floats_stand_for_each_other():
    card = gpu("H100")
    assert float(COST.gemm(card, 100, 512, 512, "fp16")) == float(COST.gemm(card, 100, 512, 512, "bf16"))
    assert float(COST.memory_pass(card, 1e9)) == float(Datasheet().memory_pass(card, 1e9))
    once = float(COST.gemm(card, 32768, 4096, 65536, "bf16"))
    for m, n, k, times in ((327680, 4096, 65536, 10), (32768, 4096, 655360, 10), (65536, 4096, 131072, 4)):
        assert float(COST.gemm(card, m, n, k, "bf16")) == pytest.approx(times * once)


# Collectives


@needs_tables
@pytest.mark.parametrize("operation", ["all_to_all", "all_reduce"])
@pytest.mark.parametrize(("kind", "count"), [("H100", 8), ("H200", 4), ("A100-80", 2), ("L40S", 8)])
def test_measured_collectives_are_met_but_where_larger_ones_were_faster(operation, kind, count):
    at, measured = collective_table(MACHINES[kind].folder, operation, count)
    cluster = one_node(kind, count)
    seconds = getattr(COST, operation)(cluster, at)
    np.testing.assert_allclose(seconds, [measured[size:].min() for size in range(len(at))], rtol=1e-12)
    assert np.isclose(seconds, measured, rtol=1e-12).mean() > 0.5
    sizes = np.geomspace(1e6, at[-1] * REACH, 50)
    assert np.all(np.diff(getattr(COST, operation)(cluster, sizes)) >= 0)
    assert float(getattr(COST, operation)(cluster, 0.0)) == 0


@needs_tables
def test_the_network_of_uneven_traffic_is_the_line_through_the_measured():
    cluster = one_node("H100", 8)
    network, size = COST.network(cluster), 2e8
    simulated = all_to_all("concurrent", None, np.full((8, 8), size / 8), network).seconds
    assert simulated == pytest.approx(float(COST.all_to_all(cluster, size)), rel=0.35)
    assert 0.4 * 450e9 < network.link[0] < 450e9
    assert 1e-6 < network.link_latency[0] < 3e-5


@needs_tables
def test_one_gpu_needs_no_network():
    alone = one_node("H100", 1, None)
    assert COST.lacks_network(alone) is None
    assert COST.all_reduce(alone, np.array([1e6])).tolist() == [0]
    assert COST.network(alone).gpus == 1


# Without a measurement


@needs_tables
def test_what_was_not_measured_is_said_with_what_to_use():
    card = gpu("H100")
    assert "no tables of V100-32 (it has A100-40" in refusal(lambda: COST.gemm(gpu("V100-32"), 1, 64, 64, "fp16"))
    message = refusal(lambda: COST.gemm(card, 1, 64, 64, "fp32"))
    assert "fp32 on H100 (it has bf16, fp16, fp8); use the datasheet" in message
    assert "fp8 on A100-80 (it has bf16, fp16)" in refusal(lambda: COST.gemm(gpu("A100-80"), 1, 64, 64, "fp8"))
    message = refusal(lambda: COST.all_to_all(one_node("H100", 8), 1e10))
    assert "all-to-all over 8 H100 was measured up to size 5.37e+08" in message


@needs_tables
@pytest.mark.parametrize(
    ("cluster", "part"),
    [
        (cluster_presets()["hgx-h100-4-nodes"].cluster, "stop at one node and the cluster has 4"),
        (cluster_presets()["mixed-8"].cluster, "stop at one node and the cluster has 4"),
        (one_node("H100", 6), "are for 2, 4, 8 GPUs, not 6"),
        (one_node("H100", 8, 64e9), "for links of 450 GB/s, drawn are 64 GB/s"),
        (one_node("H100", 8, None), "for links of 450 GB/s, drawn are none"),
        (Cluster(name="mix", nodes=(Node(name="n", gpus=(gpu("H100"), gpu("H200"))),)), "mixes types"),
        (Cluster(name="own", nodes=(Node(name="n", gpus=(make_gpu(), make_gpu())),)), "no tables of type-0"),
    ],
)
def test_networks_that_were_not_measured_are_refused(cluster, part):
    assert part in COST.lacks_network(cluster)
    for work, size in ((COST.network, ()), (COST.all_to_all, (1e6,)), (COST.all_reduce, (1e6,))):
        message = refusal(lambda work=work, size=size: work(cluster, *size))
        assert part in message and "add a source of the network: the datasheet, nccl-tests output" in message


def test_without_the_package_everything_else_works(monkeypatch):
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    silicon._data_folder.cache_clear()
    try:
        for work in (
            lambda: Silicon().source,
            lambda: Silicon().gemm(gpu("H100"), 1, 64, 64, "bf16"),
            lambda: Silicon().all_to_all(one_node("H100", 8), 1e6),
            lambda: Silicon().lacks_computation(one_node("H100", 8)),
        ):
            assert "need the package aiconfigurator-core (Linux x86-64 only), which is not installed" in refusal(work)
        line = Line(alpha=0, beta=1)
        profile = CostProfile(name="p", origin="o", gemm={"H100": line}, memory={"H100": line})
        for cost in (Datasheet(), AlphaBeta(profile)):
            assert float(cost.gemm(gpu("H100"), 1, 64, 64, "bf16")) > 0
    finally:
        silicon._data_folder.cache_clear()


def fit(experts: float, each: list[float], launch: float = 0.0) -> Fit:
    """Twice the effort from 1 to 4 seconds takes twice as long, from there on as much longer as the effort is."""
    return Fit(experts, launch, np.array(each), 0.5, np.array([1.0, 2.0, 4.0]), np.array([3.0, 6.0, 6.0]))


TABLE = KernelTable((fit(4, [1.0, 0.0, 0.0, 0.0, 0.0]), fit(16, [0.0, 0.25, 0.0, 0.0, 0.0])))


def test_the_work_of_experts_is_counted_and_of_expected_tokens_what_their_scatter_makes_of_it():
    tokens = np.array([0.0, 1.0, 16.0, 17.0, 129.0])
    assert work_of_experts(tokens).T.tolist() == [
        [0, 1, 1, 1, 1],
        tokens.tolist(),
        [0, 1, 1, 2, 9],
        [0, 1, 1, 1, 3],
        [0, 1, 1, 1, 2],
    ]
    rng = np.random.default_rng(0)
    for mean in (0.01, 0.7, 20.0, 130.0, 5000.0):
        counted = work_of_experts(rng.poisson(mean, 200_000).astype(np.float64)).mean(axis=0)
        assert work_of_experts(np.array(mean), expected=True) == pytest.approx(counted, rel=0.05 if mean < 0.1 else 0.01)
    rising = np.diff(work_of_experts(np.geomspace(1e-4, 1e5, 3000), expected=True), axis=0)
    assert rising.min() >= 0  # more tokens never are less work


def test_seconds_follow_the_effort_between_the_rows_and_beyond_and_the_experts_that_a_gpu_holds():
    def seconds(tokens: list[float], slots: float, foreign: float = 0.0) -> float:
        return float(TABLE.seconds(work_of_experts(np.array(tokens)).sum(axis=0), slots, foreign))

    assert [seconds([5.0] * busy, 4) for busy in (0, 1, 2, 3, 4)] == pytest.approx([0, 3, 6, 6, 6])  # by experts with tokens
    assert seconds([5.0] * 8, 4) == seconds([1.0] * 8, 2) == pytest.approx(12)
    assert [seconds([8.0], 16), seconds([4.0, 4.0], 16), seconds([32.0], 99)] == pytest.approx([6, 6, 12])  # by tokens
    assert seconds([16.0], 8) == pytest.approx((3 * 6) ** 0.5)  # half-way between 4 and 16
    assert seconds([0.1], 4, foreign=2.0) == pytest.approx(6)
    for tokens in (np.array([0.3, 4.0, 0.0, 50.0]), np.full(9, 2.0)):
        work = work_of_experts(tokens, expected=True).sum(axis=0)
        for slots in (2, 4, 7, 16, 40):
            assert TABLE.least(tokens).sum() <= TABLE.seconds(work, slots) * (1 + 1e-12)
    assert TABLE.least(np.array([4.0, 0.0])) == pytest.approx([1.5 * (1 - np.exp(-4)), 0])


def test_loads_of_a_law_have_all_copies_and_the_busiest_gpu_is_taken():
    for experts, k, tokens, held in ((16, 4, 1, 4), (16, 4, 3, 16), (16, 2, 500, 2), (8, 2, 40_000, 8), (12, 1, 7, 3)):
        loads = busiest_gpu(experts, k, tokens, held, 1.2)
        whole = busiest_gpu(experts, k, tokens, experts, 1.2)
        assert loads.shape[1] == held and whole.sum(axis=1).tolist() == [tokens * k] * len(whole)
        assert loads.min() >= 0 and loads.max() <= tokens and whole.max() <= tokens
        assert (loads.sum(axis=1) >= tokens * k * held / experts).all()
    steep, flat = (busiest_gpu(64, 8, 1000, 64, exponent).max() for exponent in (1.2, 0.2))
    assert steep > 2 * flat


@needs_tables
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("card", "model", "most"),
    [
        ("H200", DEEPSEEK, 0.03),
        ("H200", QWEN, 0.03),
        ("H200", KIMI, 0.03),
        ("B200", DEEPSEEK.model_copy(update={"expert_bits": 4.5}), 0.07),  # their tokens choose within groups of experts
    ],
    ids=["R1", "Qwen", "4-bit integers", "NVFP4"],
)
def test_balanced_rows_are_met(card, model, most, phase):
    rows = kernel_rows(card, model, phase)
    balanced = rows[rows.distribution.isin(("balanced", "uniform"))]
    assert len(balanced) > 40 and not balanced.held_out.any()
    table = kernel_table(card, model, phase)
    ours = np.array([table.seconds(row.work, row.experts_held, row.foreign) for row in balanced.itertuples()])
    assert np.mean(np.abs(ours / balanced.seconds.to_numpy() - 1)) < most


@needs_tables
def test_wide_kernels_go_before_the_usual_ones():
    """Balanced, 64 tokens on each of 32 H200: aiconfigurator's command line takes 7.07 ms for 61 layers."""
    work = 8 * work_of_experts(np.array(64.0))
    assert 61 * kernel_table("H200", DEEPSEEK, "decode").seconds(work, 8) == pytest.approx(7.072e-3, rel=2e-3)


@needs_tables
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("card", "model"), [("H200", DEEPSEEK), ("H200", QWEN), ("B200", QWEN)], ids=["R1", "Qwen", "B200"])
def test_power_law_rows_that_no_fit_has_seen_are_met(card, model, phase):
    errors = skew_errors(card, model, phase)
    unseen = errors[errors.held_out].error
    assert 0.4 < len(unseen) / len(errors) < 0.6
    assert unseen.abs().mean() < 0.06 and unseen.abs().max() < 0.4 and abs(unseen.mean()) < 0.02


@needs_tables
def test_few_tokens_of_few_experts_are_faster_and_a_heavy_expert_is_slower():
    """Half of the experts with all of the tokens: half of the weights in decode, as much arithmetic in prefill."""
    for tokens, phase, faster in ((0.5, "decode", True), (2000.0, "prefill", False)):
        table = kernel_table("H200", DEEPSEEK, phase)
        even = table.seconds(work_of_experts(np.full(32, tokens), True).sum(axis=0), 32)
        uneven = table.seconds(work_of_experts(np.repeat([2 * tokens, 0.0], 16), True).sum(axis=0), 32)
        assert (uneven < 0.95 * even) if faster else (uneven == pytest.approx(even, rel=0.03))


@needs_tables
def test_it_stands_in_for_the_experts_alone():
    cost, card, tokens = FusedExperts(Datasheet(), "decode", 8.0), gpu("H200"), np.array([0.0, 64.0, 128.0])
    assert cost.expert_ffn(card, tokens, DEEPSEEK)[1] < Datasheet().expert_ffn(card, tokens, DEEPSEEK)[1]
    cluster = h200(1)
    assert cost.all_to_all(cluster, 1e6) == Datasheet().all_to_all(cluster, 1e6)
    assert cost.source.startswith("experts: fused kernels of SGLang (decode), measured") and "datasheet" in cost.source
    assert cost.digest != FusedExperts(Datasheet(), "decode", 9.0).digest


@needs_tables
def test_gpus_that_only_the_package_has_have_their_kernels_and_what_was_not_measured_is_named():
    tokens = np.array([16.0])
    work = 16 * work_of_experts(tokens)
    here, faster = (kernel_table(kind, QWEN, "decode").seconds(work, 16)[0] for kind in ("H200", "GB200"))
    assert here / 3 < faster < here
    assert kernel_table("V100-32", DEEPSEEK, "decode") is None
    assert kernel_table("H200", KIMI.model_copy(update={"expert_bits": 6.25}), "decode") is None
    assert kernel_table("H200", DEEPSEEK.model_copy(update={"expert_bits": 4.5}), "decode") is None  # NVFP4 before Blackwell
    alpha = model_presets()["tiny-moe-alpha"].model
    assert kernel_table("H200", alpha, "decode") is None
    with pytest.raises(InputError, match="no measured fused kernels for tiny-moe-alpha in bf16 on H200"):
        FusedExperts(Datasheet(), "decode", 2.0).expert_ffn(gpu("H200"), np.ones(1), alpha)


def test_all_else_is_as_the_source_prices_it():
    tokens = np.array([1.0, 64.0])
    lines = {kind: {"H200": Line(alpha=alpha, beta=1e-15)} for kind, alpha in (("gemm", 1e-6), ("gate", 5e-6))}
    profile = CostProfile(name="p", origin="a test", ranks=8, **lines)
    for rest in (Datasheet(), AlphaBeta(profile), Scaled(Datasheet(), tokens=2.0)):
        cost, card = FusedExperts(rest, "decode", 8.0), gpu("H200")
        assert cost.gate(card, tokens, DEEPSEEK) == pytest.approx(rest.gate(card, tokens, DEEPSEEK))
        assert cost.aggregate(card, tokens, DEEPSEEK) == pytest.approx(rest.aggregate(card, tokens, DEEPSEEK))
        assert cost.attention(card, tokens, 9, DEEPSEEK) == pytest.approx(rest.attention(card, tokens, 9, DEEPSEEK))


GPU = make_gpu()
M, N, K = (1, 8, 64), (16, 512), (32, 128, 1024)


def power_law(m, n, k):
    """Straight in the logarithms, so that interpolation meets it exactly everywhere."""
    return 1e-7 * m**0.9 * n**0.7 * k**0.8


POINTS = [(m, n, k, power_law(m, n, k)) for m, n, k in product(M, N, K)]


def profiled(points, **changes) -> Profiled:
    gemm = (GemmTimes(gpu="type-0", dtype="bf16", points=points),)
    return Profiled(MeasuredTimes(name="grid", origin="a test", gemm=gemm, **changes))


def test_a_complete_grid_is_recognised_in_any_order_and_anything_else_is_none():
    table = GemmTable.of(POINTS[::-1])
    assert (table.m.tolist(), table.n.tolist(), table.k.tolist()) == (list(M), list(N), list(K))
    assert table.seconds[1, 0, 2] == power_law(8, 16, 1024)
    missing, twice = POINTS[1:], [*POINTS[1:], POINTS[1]]
    one_n, diagonal = [point for point in POINTS if point[1] == 16], [(m, 4 * m, 2 * m, 1.0) for m in range(1, 9)]
    assert [GemmTable.of(points) for points in (missing, twice, one_n, diagonal)] == [None] * 4


def test_a_size_measured_several_times_counts_by_its_median_and_the_grid_stays_one():
    bumpy = [(m, n, k, seconds * (5 if m == 8 else 1)) for m, n, k, seconds in POINTS]
    seconds = profiled(bumpy).gemm(GPU, np.geomspace(1, 200, 50), 100, 100, "bf16")
    assert (np.diff(seconds) >= 0).all(), "more rows never take less time than fewer"
    more = [*POINTS, (8, 16, 32, 3 * power_law(8, 16, 32)), (8, 16, 32, 2 * power_law(8, 16, 32))]
    assert float(profiled(more).gemm(GPU, 8, 16, 32, "bf16")) == pytest.approx(2 * power_law(8, 16, 32))
    assert float(profiled(more).gemm(GPU, 64, 77, 500, "bf16")) == pytest.approx(power_law(64, 77, 500))


def test_far_more_rows_than_measured_are_refused():
    cost = profiled(POINTS)
    assert float(cost.gemm(GPU, REACH * 64, 16, 32, "bf16")) == pytest.approx(REACH * power_law(64, 16, 32))
    assert "measured up to m = 64 and 320 is asked for" in refusal(cost.gemm, GPU, 5 * 64, 16, 32, "bf16")


def test_shapes_that_form_no_grid_keep_to_the_nearest():
    cost = profiled([point for point in POINTS if (point[1], point[2]) != (512, 1024)])
    assert float(cost.gemm(GPU, 8, 16, 32, "bf16")) == pytest.approx(power_law(8, 16, 32))
    start_up = power_law(1, 16, 32)
    predicted = start_up + (power_law(8, 512, 128) - start_up) * 8
    assert float(cost.gemm(GPU, 8, 512, 1024, "bf16")) == pytest.approx(predicted)
