"""What a cluster adds up to: speeds between nodes, and models in its memory."""

import numpy as np
import pytest

from app.charts.cluster import link_speeds, node_rates
from app.cluster.table import memory_fit, without_fp8
from engine.catalogue import cluster_presets, gpu_types
from engine.cluster import Cluster, Node
from engine.network import Network
from engine.simulate.flows import all_to_all
from tests.strategies import cluster_of, make_gpu, make_model

PRESETS = cluster_presets()


@pytest.mark.parametrize("name", ["mixed-8", "exflow-4-nodes", "lancet-p3dn-2-nodes"])
def test_two_nodes_that_send_evenly_take_as_long_as_their_rate_says(name: str) -> None:
    """Bytes spread over the ports as these are fast: the simulated all-to-all then needs bytes / rate."""
    cluster = PRESETS[name].cluster.model_copy(update={"latency": 0.0})
    rates, network, node = node_rates(cluster), Network.of(cluster), cluster.node_of_gpu
    for source in range(min(3, len(cluster.nodes))):
        for target in range(min(3, len(cluster.nodes))):
            if source == target:
                continue
            weight = np.outer(network.send * (node == source), network.receive * (node == target))
            traffic = 1e9 * weight / weight.sum()
            took = all_to_all("concurrent", None, traffic, network).seconds
            assert took == pytest.approx(1e9 / rates[source, target])


def test_inside_a_node_its_own_links_count() -> None:
    gpu = make_gpu()
    nodes = (Node(name="a", gpus=(gpu, gpu, gpu), link_bandwidth=5e9), Node(name="b", gpus=(gpu,)))
    rates = node_rates(Cluster(name="c", nodes=nodes))
    assert rates[0, 0] == 15e9
    assert np.isnan(rates[1, 1])


def test_the_title_names_the_slowest_pair_and_no_name_is_markup() -> None:
    fast, slow = gpu_types()["H100"].gpu(10e9), gpu_types()["V100-16"].gpu(1e9)
    nodes = (Node(name="<b>a", gpus=(fast,)), Node(name="b", gpus=(fast,)), Node(name="c", gpus=(slow,)))
    figure = link_speeds(Cluster(name="c", nodes=nodes), dark=False)
    assert figure.layout.title.text == "Slowest pair: 8 Gb/s, &lt;b&gt;a → c and 3 more"
    assert "<b>" not in str(figure.to_dict())
    equal = link_speeds(Cluster(name="c", nodes=nodes[:2]), dark=True)
    assert equal.layout.title.text == "Every node reaches every other at 80 Gb/s"


def test_every_preset_has_its_matrix() -> None:
    for preset in PRESETS.values():
        if len(preset.cluster.nodes) > 1:
            assert np.shape(link_speeds(preset.cluster, dark=False).data[0].z) == (len(preset.cluster.nodes),) * 2


@pytest.mark.parametrize(
    "memories, fits, reason",
    [
        ((4.0, 4.0), True, ""),
        ((6.0, 2.5), True, "too much for 1 of the GPUs (GPU 1 · T0 holds 2)"),
        ((4.0, 2.5), False, "This cluster holds only 6 of the 8 experts"),
    ],
)
def test_whether_a_model_fits(memories: tuple[float, ...], fits: bool, reason: str) -> None:
    """memories: in slots, of which a GPU has room for 0.9."""
    model = make_model(3, 8)
    slot = 3 * model.bytes_per_expert / 0.9
    cluster = cluster_of(
        *(make_gpu().model_copy(update={"memory": memory * slot * 1.001, "type": "T0"}) for memory in memories)
    )
    (text, placeable), *others = memory_fit(cluster, [model])
    assert placeable is fits
    assert reason in text
    assert not others


def test_gpus_without_8_bit_units_are_named_where_the_model_is_in_fp8() -> None:
    old, new = gpu_types()["A100-80"].gpu(), gpu_types()["H100"].gpu()
    model = make_model(3, 8, dtype="fp8")
    (sentence,) = without_fp8(cluster_of(old, new, old), [model])
    assert sentence.startswith("A100-80 without fp8: narrow computes at the 16-bit rate")
    assert old.flops("fp8") == old.flops_fp16 and new.flops("fp8") > new.flops_fp16
    assert not without_fp8(cluster_of(new), [model]) and not without_fp8(cluster_of(old), [make_model(3, 8)])


def test_two_models_are_also_held_against_the_memory_together() -> None:
    model = make_model(3, 8)
    room = 1.5 * 24 * model.bytes_per_expert / 0.9
    cluster = cluster_of(make_gpu().model_copy(update={"memory": room}))
    assert [fits for _, fits in memory_fit(cluster, [model, model])] == [True, True, False]
