"""The Cluster page: its warnings, the cluster as a table and back, its sums, and clusters from the machine or from files."""

import io
import sys
import zipfile
from itertools import combinations, permutations
from xml.etree import ElementTree

import numpy as np
import pytest
import streamlit as st
import torch
from streamlit.testing.v1 import AppTest

from app.charts.cluster import HEIGHT, WIDTH, link_speeds, node_rates, picture, svg
from app.charts.theme import gpu_colour
from app.charts.trust import MOST_GPUS, NUMBERED_GPUS, pair_rates
from app.cluster.board import in_words
from app.cluster.table import memory_fit, shows, to_cluster, to_frame, usual_ports, without_fp8
from engine.catalogue import cluster_presets, gpu_types
from engine.catalogue.packaged import packaged_gpu_types
from engine.cluster import Cluster, Efficiency, Gpu, Node
from engine.costs.pair_cluster import PairCluster, held_against
from engine.errors import InputError
from engine.network import Network
from engine.simulate.flows import all_to_all
from tests.cases.files import NODES, everywhere, pair_log, printed, two_nodes
from tests.cases.pages import answers, complaints, enter, press, said, studio, upload, visit
from tests.costs.silicon import needs_tables
from tests.launch.nvml import GIB, plug_in, switched
from tests.launch.nvml import Gpu as Attached
from tests.strategies import cluster_of, make_gpu, make_model


def warnings(app: AppTest) -> list[str]:
    """The warnings of missing links."""
    return [text for text in said(app.warning).split(" | ") if "NVLink" in text]


def test_eight_h100_without_links_are_warned_of_and_mended_with_one_click(app: AppTest) -> None:
    gpu = gpu_types()["H100"].gpu()
    app.session_state["cluster"] = Cluster(name="drawn", nodes=(Node(name="node 1", gpus=(gpu,) * 8),))
    visit(app, "cluster")
    (warning,) = warnings(app)
    assert warning.startswith("node 1: 8 H100 without links inside") and "450 GB/s out of each H100" in warning
    press(app, "Add NVLink")
    assert app.session_state["cluster"].nodes[0].link_bandwidth == 450e9 and not warnings(app)


def test_the_gallery_comes_first_where_no_cluster_is_open_and_opens_one(app: AppTest) -> None:
    visit(app, "cluster")
    cards = {button.key.removeprefix("preset-") for button in app.button if (button.key or "").startswith("preset-")}
    assert cards == set(cluster_presets())
    assert "Choose a preset" in said(app.info) and not app.tabs
    app.button(key="preset-hgx-h100-4-nodes").click().run()
    assert not app.exception
    assert app.session_state["cluster"] == cluster_presets()["hgx-h100-4-nodes"].cluster
    assert [tab.label.rpartition(": ")[2].rstrip("]") for tab in app.tabs] == [
        "Inventory",
        "Links between nodes",
        "Costs",
        "Trust",
    ]
    assert "Choose a preset" not in said(app.info)
    app.button(key="strip-cluster-mixed-8").click().run()
    assert not warnings(app)


@pytest.mark.parametrize("name", cluster_presets())
def test_a_picture_has_every_gpu_in_the_colour_of_its_type_and_stays_in_its_frame(name: str) -> None:
    cluster = cluster_presets()[name].cluster
    boxes = [dict(part.items()) for part in ElementTree.fromstring(svg(cluster)) if part.tag.endswith("rect")]
    gpus = [box for box in boxes if box["fill"] != "none"]
    assert [box["fill"] for box in gpus] == [gpu_colour(gpu.type) for gpu in cluster.gpus]
    assert len(boxes) - len(gpus) == len(cluster.nodes)
    for box in boxes:
        x, y, width, height = (float(box[side]) for side in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + width <= WIDTH and y + height <= HEIGHT and min(width, height) >= 1.5


PRESETS = cluster_presets()


def test_presets_in_words() -> None:
    names = ("hgx-h100-4-nodes", "hgx-h100-8", "hgx-h100-and-l40s", "mixed-8")
    words = ["32 H100 in 4 nodes", "8 H100 in 1 node", "8 H100 + 8 L40S in 2 nodes", "8 GPUs of 4 types in 4 nodes"]
    assert [in_words(PRESETS[name].cluster) for name in names] == words


def test_an_edited_table_keeps_what_ports_reach() -> None:
    cluster = PRESETS["mixed-8"].cluster.model_copy(update={"efficiency": Efficiency(fabric=((1, 1.0), (4, 0.5)))})
    frame = to_frame(cluster)
    frame.loc[0, "type"] = "B200"
    assert to_cluster(frame, cluster, 0.0).efficiency == cluster.efficiency


@pytest.mark.parametrize("name", ["B200", pytest.param("GB200", marks=needs_tables)])
def test_a_new_type_also_one_that_only_the_package_has_brings_its_own_numbers(name: str) -> None:
    cluster = PRESETS["mixed-8"].cluster
    frame = to_frame(cluster)
    frame.loc[0, "type"] = name
    changed = to_cluster(frame, cluster, 0.0)
    memory = 180 * 2**30 if name == "B200" else packaged_gpu_types()[name].memory
    assert changed.gpus[0].memory == pytest.approx(memory)
    assert changed.gpus[0].send_bandwidth == cluster.gpus[0].send_bandwidth


def test_a_row_that_cannot_be_is_named_no_rows_are_no_cluster_and_one_added_needs_only_a_node_and_a_type() -> None:
    cluster = PRESETS["mixed-8"].cluster
    wrong = {"node": (None, "Row 2"), "type": (None, "Row 2"), "send": (0.0, "Row 2: Send"), "memory": (-1.0, "Row 2: Memory")}
    for column, (value, reason) in wrong.items():
        frame = to_frame(cluster).astype({"node": object, "type": object})
        frame.loc[1, column] = value
        with pytest.raises(InputError, match=reason):
            to_cluster(frame, cluster, 0.0)
    frame = to_frame(cluster)
    with pytest.raises(InputError, match="at least one GPU"):
        to_cluster(frame.iloc[:0], cluster, 0.0)
    frame.loc[len(frame)] = rows(("new", "H100"))[0]
    changed = to_cluster(frame, cluster, 0.0)
    assert (changed.nodes[-1].name, changed.gpus[-1].type) == ("new", "H100")


def test_a_table_that_nobody_edited_is_the_cluster_itself_whatever_its_numbers() -> None:
    random = np.random.default_rng(3)

    def odd(gpu: Gpu) -> Gpu:
        return gpu.model_copy(
            update={"memory": gpu.memory * random.uniform(0.5, 2), "send_bandwidth": random.uniform(1e9, 1e11)}
        )

    clusters = [preset.cluster for preset in PRESETS.values()]
    for _ in range(50):
        gpus = [odd(gpu) for gpu in PRESETS["mixed-8"].cluster.gpus]
        links = random.uniform(1e9, 1e12, len(gpus)).tolist()
        nodes = (Node(name=f"{at}", gpus=(gpu,), link_bandwidth=links[at]) for at, gpu in enumerate(gpus))
        clusters.append(Cluster(name="odd", nodes=tuple(nodes), latency=random.uniform(0, 1e-4)))
    for cluster in clusters:
        assert to_cluster(to_frame(cluster), cluster, cluster.latency * 1e6) is cluster
        frame = to_frame(cluster)
        frame.loc[3, "send"] *= 1 + 1e-9
        assert to_cluster(frame, cluster, cluster.latency * 1e6) is not cluster


LINKED = Cluster(
    name="linked",
    nodes=tuple(
        Node(name=name, gpus=(PRESETS["mixed-8"].cluster.gpus[0],) * count, link_bandwidth=link, link_latency=1e-6)
        for name, count, link in (("a", 3, 450e9), ("b", 2, None), ("c", 1, 300e9))
    ),
)


@pytest.mark.parametrize(
    "edits, links, still_shown",
    [
        ({(1, "link"): 200.0}, {"a": 200e9, "b": None, "c": 300e9}, False),  # one row counts for its node
        ({(1, "link"): np.nan}, {"a": None, "b": None, "c": 300e9}, False),
        ({(0, "link"): 0.0}, {"a": None, "b": None, "c": 300e9}, False),
        ({(row, "link"): 50.0 for row in range(3)}, {"a": 50e9, "b": None, "c": 300e9}, True),
        ({(2, "node"): "b"}, {"a": 450e9, "b": None, "c": 300e9}, False),  # a GPU takes the links that it finds
        ({(3, "node"): "a"}, {"a": 450e9, "b": None, "c": 300e9}, False),
        ({(2, "node"): "d"}, {"a": 450e9, "d": 450e9, "b": None, "c": 300e9}, True),  # and keeps them alone
        ({(5, "node"): "e"}, {"a": 450e9, "b": None, "e": 300e9}, True),
        ({(1, "send"): 7.0}, {"a": 450e9, "b": None, "c": 300e9}, True),
    ],
)
def test_links_belong_to_the_node_whichever_row_they_are_typed_into(edits: dict, links: dict, still_shown: bool) -> None:
    base = to_frame(LINKED)
    frame = base.copy()
    for (row, column), value in edits.items():
        frame.loc[row, column] = value
    changed = to_cluster(frame, LINKED, 0.0, base)
    assert {node.name: node.link_bandwidth for node in changed.nodes} == links
    assert shows(frame, changed) is still_shown
    again = to_frame(changed)  # the table is written anew from it
    assert to_cluster(again, changed, 0.0, again) is changed
    assert shows(again, changed)


def test_a_row_added_to_a_linked_node_has_its_links_and_a_renamed_one_keeps_what_is_not_shown() -> None:
    base = to_frame(LINKED)
    frame = base.copy()
    frame.loc[len(frame)] = rows(("a", "H100"))[0]
    changed = to_cluster(frame, LINKED, 0.0, base)
    grown = changed.nodes[0]
    assert (grown.name, len(grown.gpus), grown.link_bandwidth) == ("a", 4, 450e9)
    assert not shows(frame, changed)
    bare = to_cluster(base.assign(link=np.nan), LINKED, 0.0, base)
    assert bare.nodes[0].link_bandwidth is None
    assert to_cluster(frame.assign(link=np.nan), bare, 0.0, base).nodes[0].link_bandwidth is None, "taken away they stay away"
    frame = base.replace({"node": {"b": "renamed"}})
    changed = to_cluster(frame, LINKED, 0.0, base)
    assert [(node.name, node.link_latency) for node in changed.nodes] == [("a", 1e-6), ("renamed", 1e-6), ("c", 1e-6)]
    assert shows(frame, changed)


def rows(*cells: tuple[str, str]) -> list[dict]:
    return [{**dict.fromkeys(to_frame(PRESETS["mixed-8"].cluster), np.nan), "node": node, "type": kind} for node, kind in cells]


@pytest.mark.parametrize(
    ("kinds", "link"), [(("H100", "H100"), 450e9), (("L40S", "L40S"), None), (("H100", "A100-80"), None), (("H100",), None)]
)
def test_a_new_node_has_the_links_that_its_gpus_come_with(kinds: tuple[str, ...], link: float | None) -> None:
    cluster = PRESETS["mixed-8"].cluster
    frame = to_frame(cluster)
    for row in rows(*(("new", kind) for kind in kinds)):
        frame.loc[len(frame)] = row
    changed = to_cluster(frame, cluster, 0.0, to_frame(cluster))
    assert changed.nodes[-1].link_bandwidth == link
    assert changed.nodes[:-1] == cluster.nodes, "nodes of several GPUs keep what they have"
    assert shows(frame, changed) is (link is None), "the table is written anew, with the links"


def test_a_preset_that_was_changed_is_not_called_so() -> None:
    cluster = cluster_presets()["hgx-h100-4-nodes"].cluster
    frame = to_frame(cluster)
    frame.loc[0, "send"] = 100.0
    changed = to_cluster(frame, cluster, cluster.latency * 1e6)
    assert changed.name == "hgx-h100-4-nodes, changed"
    frame.loc[1, "send"] = 100.0
    assert to_cluster(frame, changed, cluster.latency * 1e6).name == changed.name


def test_ports_that_nobody_gave_are_told_with_what_they_are_taken_from() -> None:
    types, other = gpu_types(), packaged_gpu_types()["GB200"]
    source = "L40S 50 Gb/s (Amazon EC2 g6e.48xlarge, 400 Gb/s for eight GPUs)"
    assert usual_ports(cluster_of(types["L40S"].gpu(), types["H100"].gpu(1e9))) == [source]
    (sentence,) = usual_ports(cluster_of(other.gpu()))
    assert other.source in sentence


@pytest.mark.parametrize("name", ["mixed-8", "exflow-4-nodes", "lancet-p3dn-2-nodes"])
def test_two_nodes_that_send_evenly_take_as_long_as_their_rate_says(name: str) -> None:
    """Bytes spread over the ports as these are fast: the simulated all-to-all then needs bytes / rate."""
    cluster = PRESETS[name].cluster.model_copy(update={"latency": 0.0})
    rates, network, node = node_rates(cluster), Network.of(cluster), cluster.node_of_gpu
    for source, target in permutations(range(min(3, len(cluster.nodes))), 2):
        weight = np.outer(network.send * (node == source), network.receive * (node == target))
        took = all_to_all("concurrent", None, 1e9 * weight / weight.sum(), network).seconds
        assert took == pytest.approx(1e9 / rates[source, target])
    nodes = (Node(name="a", gpus=(make_gpu(),) * 3, link_bandwidth=5e9), Node(name="b", gpus=(make_gpu(),)))
    rates = node_rates(Cluster(name="c", nodes=nodes))
    assert rates[0, 0] == 15e9 and np.isnan(rates[1, 1]), "inside a node its own links count"


def test_the_title_names_the_slowest_pair_and_no_name_is_markup() -> None:
    ports = {"<b>a": 10e9, "b": 10e9, "c": 1e9}
    nodes = tuple(Node(name=name, gpus=(gpu_types()["H100"].gpu(port),)) for name, port in ports.items())
    figure = link_speeds(Cluster(name="c", nodes=nodes), dark=False)
    assert figure.layout.title.text == "Slowest pair: 8 Gb/s, &lt;b&gt;a → c and 3 more"
    assert "<b>" not in str(figure.to_dict())
    equal = link_speeds(Cluster(name="c", nodes=nodes[:2]), dark=True)
    assert equal.layout.title.text == "Every node reaches every other at 80 Gb/s"


def test_every_preset_has_its_picture_and_its_matrix() -> None:
    for preset in PRESETS.values():
        drawn = next(trace for trace in picture(preset.cluster).data if trace.mode == "markers+text")
        assert len(drawn.x) == len(preset.cluster.gpus)
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
    gpus = [make_gpu().model_copy(update={"memory": memory * slot * 1.001, "type": "T0"}) for memory in memories]
    (text, placeable), *others = memory_fit(cluster_of(*gpus), [model])
    assert placeable is fits and reason in text and not others
    room = cluster_of(make_gpu().model_copy(update={"memory": 12 * slot}))
    assert [fits for _, fits in memory_fit(room, [model, model])] == [True, True, False], "two are held against it together too"


def test_gpus_without_8_bit_units_are_named_where_the_model_is_in_fp8() -> None:
    old, new = gpu_types()["A100-80"].gpu(), gpu_types()["H100"].gpu()
    model = make_model(3, 8, dtype="fp8")
    (sentence,) = without_fp8(cluster_of(old, new, old), [model])
    assert sentence.startswith("A100-80 without fp8: narrow computes at the 16-bit rate")
    assert old.flops("fp8") == old.flops_fp16 and new.flops("fp8") > new.flops_fp16
    assert not without_fp8(cluster_of(new), [model]) and not without_fp8(cluster_of(old), [make_model(3, 8)])


DETECT, OPEN = "Detect attached GPUs", "Open these GPUs"
TYPE = "GPU type, where the driver or a file does not name it"


@pytest.fixture
def page(monkeypatch) -> AppTest:
    """The Cluster page with nothing open, on a machine without a GPU for PyTorch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    st.cache_resource.clear()  # the devices that an earlier test saw attached
    app = studio().run()
    yield visit(app, "cluster")
    st.cache_resource.clear()


def gpus(page: AppTest) -> str | None:
    return next((metric.value for metric in page.metric if metric.label == "GPUs"), None)


def test_no_gpu(page, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    press(page, DETECT)
    (warning,) = page.warning
    assert "no GPU attached" in warning.value and "preset" in warning.value
    assert not page.error and gpus(page) is None
    assert "Choose a preset" in said(page.info), "the empty page still says what to do"


def test_gpus_are_drawn_once_asked_for_and_garbage_leaves_them_open(page, monkeypatch):
    plug_in(monkeypatch, switched("NVIDIA H200", 8, links=18, memory=140 * GIB))
    press(page, DETECT)
    assert not page.warning and not page.error and "450 GB/s" in page.success[0].value
    assert gpus(page) is None, "nothing is opened before it is asked for"
    press(page, OPEN)
    assert gpus(page) == "8" and not page.error
    for name, text in (("dgx.txt", "what a fine day"), ("dgx.txt", ""), ("cluster.json", '{"nodes": 3}')):
        drop(page, {name: text})
        assert name.split(".")[0] in page.error[0].value and gpus(page) == "8"


def test_a_name_that_is_not_known_needs_a_type(page, monkeypatch):
    plug_in(monkeypatch, [Attached("NVIDIA H100 NVL", 94 * GIB, bus=at) for at in range(2)])
    press(page, DETECT)
    assert "H100 NVL" in page.warning[0].value and gpus(page) is None
    press(enter(page, TYPE, "H100"), DETECT)
    press(page, OPEN)
    assert gpus(page) == "2" and all("H100 NVL" not in warning.value for warning in page.warning)


def test_a_topology_names_its_gpus_or_their_type_is_chosen_which_draws_it_again_and_nothing_else_does(page):
    listed = "".join(f"GPU {at}: NVIDIA H100 80GB HBM3 (UUID: GPU-{at})\n" for at in range(8))
    drop(page, {"dgx.txt": listed + printed(everywhere("NV18", 8), nics=8)})
    assert gpus(page) == "8" and not page.error and "8 network cards" in said(page.caption)
    drop(page, {"dgx.txt": printed(everywhere("NV12", 4))})
    assert "choose their type" in page.error[0].value and gpus(page) == "8", "nothing is opened"
    enter(page, TYPE, "L40S")
    assert "no NVLinks" in page.error[0].value and gpus(page) == "8"
    for kind, memory in (("A100-80", "320 GiB"), ("A100-40", "160 GiB")):
        enter(page, TYPE, kind)
        assert gpus(page) == "4" and not page.error
        assert next(metric.value for metric in page.metric if metric.label == "Memory") == memory
    page.button(key="preset-mixed-8").click().run()
    assert gpus(page) == "8", "the file is still in its widget, but what was opened last counts"


def set_of_logs(**options) -> dict[str, str]:
    return {f"{number}.log": pair_log(ends, two_nodes(*ends), **options) for number, ends in enumerate(combinations(NODES, 2))}


def drop(app: AppTest, files: dict[str, str | bytes], key: str = "cluster-file") -> AppTest:
    """Upload files, on the Cluster page unless a key names another uploader."""
    return upload(app, key, files)


def shows_pairs(app: AppTest) -> bool:
    return "Measured pairs" in [heading.value for heading in app.subheader]


def test_a_set_is_drawn_on_any_page_and_shown_beside_its_cluster(app):
    drop(app, set_of_logs(), "recordings")
    (answer,) = answers(app)
    assert answer.startswith("opened the cluster node2 and 1 more host: ") and "one pair ran at a time" in answer
    assert not complaints(app) and not app.session_state["sources"]
    visit(app, "cluster")
    assert gpus(app) == "4" and shows_pairs(app)
    assert any(f"Mean difference {off} %" in said(app.caption) for off in ("0", "< 0.1"))
    (worst,) = [table.value for table in app.dataframe if "Pair" in table.value]
    assert list(worst["Measured"]).count("320 Gb/s") == 4 and list(worst["Measured"]).count("2.4 Tb/s") == 2
    app.button(key="preset-mixed-8").click().run()
    assert gpus(app) == "8" and not shows_pairs(app), "they are of other hosts"


def test_an_archive_with_a_folder_a_pair(app):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number, text in enumerate(set_of_logs().values()):
            archive.writestr(f"run-{number}/out.log", text)
        archive.writestr("notes.md", "measured in March")
    drop(visit(app, "cluster"), {"runs.zip": packed.getvalue()})
    assert gpus(app) == "4" and shows_pairs(app) and len(answers(app)) == 1
    app.session_state["pairs"] = "0" * 64  # the data folder has lost them
    app.run()
    assert not app.exception and gpus(app) == "4" and not shows_pairs(app)


def test_one_log_is_times_until_another_pair_is_dropped_beside_it(app):
    logs = set_of_logs()
    first = {"0.log": logs["0.log"]}
    drop(visit(app, "cluster"), first)
    (answer,) = answers(app)
    assert answer.startswith("read 0: choose it") and "with the logs of other pairs they are a cluster" in answer
    assert gpus(app) is None
    drop(app, first | {"1.log": logs["1.log"]})
    assert gpus(app) == "3"
    assert "1 of the 3 pairs of these 3 GPUs were not measured" in answers(app)[0]
    assert "crossed out or empty" in said(app.caption)


def test_other_tests_among_them_go_their_own_way(app):
    others = {"all.log": pair_log(NODES, 50e9, binary="alltoall_perf")}
    others["gather.log"] = pair_log(NODES[:2], 1e9, binary="all_gather_perf")
    drop(visit(app, "cluster"), set_of_logs() | others)
    assert gpus(app) == "4" and list(app.session_state["sources"]) == ["all"]
    (complaint,) = complaints(app)
    assert complaint.startswith("gather.log, test from line 2: 'all_gather_perf' is not a test of")


def test_a_damaged_log_is_named_once_and_without_it_the_others_are_drawn(app):
    logs = set_of_logs()
    damaged = logs | {"3.log": logs["3.log"].replace("double none -1", "double none -1 x")}
    drop(visit(app, "cluster"), damaged)
    (complaint,) = complaints(app)
    assert complaint.startswith("3.log, line 10: a row needs size")
    assert complaint.endswith("; none of the 6 files that belong together was opened") and gpus(app) is None
    damaged.pop("3.log")
    drop(app, damaged)
    assert not complaints(app) and gpus(app) == "4"
    assert "1 of the 6 pairs of these 4 GPUs were not measured" in answers(app)[0]


def test_a_type_that_no_log_names_is_asked_for(app):
    logs = set_of_logs(device="AMD Instinct MI100")
    drop(app, logs, "recordings")
    assert "choose the nearest GPU type on the Cluster page" in complaints(app)[0] and app.session_state["cluster"] is None
    drop(visit(app, "cluster"), logs)
    assert "'AMD Instinct MI100' is not in the catalogue" in complaints(app)[0] and gpus(app) is None
    enter(app, TYPE, "H200")
    assert gpus(app) == "4" and not complaints(app) and shows_pairs(app)


def pairs_of(hosts: int, gpus_of_a_host: int, measured: np.ndarray) -> PairCluster:
    """measured: float64[gpu, gpu] bytes/s; drawn are 40 GB/s in a node and 5 between them."""
    gpu = make_gpu().model_copy(update={"send_bandwidth": 5e9, "receive_bandwidth": 5e9})
    gpus, link = (gpu,) * gpus_of_a_host, 40e9 if gpus_of_a_host > 1 else None
    nodes = tuple(Node(name=f"<b>{host}", gpus=gpus, link_bandwidth=link) for host in range(hosts))
    names = [node.name for node in nodes for _ in gpus]
    return held_against(Cluster(name="c", nodes=nodes), names, [str(bus) for bus in range(len(gpus))] * hosts, measured)


def matrix(gpus: int, of_a_host: int, near: float = 40e9, far: float = 5e9) -> np.ndarray:
    host = np.arange(gpus) // of_a_host
    return np.where(np.eye(gpus, dtype=bool), np.nan, np.where(host[:, None] == host, near, far))


def test_the_three_matrices():
    measured = matrix(4, 2)
    measured[0, 2] = measured[2, 0] = 10e9
    measured[1, 3] = measured[3, 1] = np.nan
    figure = pair_rates(pairs_of(2, 2, measured), dark=False)
    worst = "GPU 0 with GPU 2 most: 80 Gb/s measured, 40 Gb/s drawn"
    assert figure.layout.title.text == f"1 of 5 pairs is more than 10 % off, {worst}"
    was, drawn, difference = figure.select_traces({"type": "heatmap"})
    assert was.z[0, 2] == pytest.approx(10) and drawn.z[0, 2] == pytest.approx(np.log10(5e9))
    assert was.customdata[0, 2] == 80 and drawn.customdata[0, 2] == 40 and difference.customdata[0, 2] == -50
    assert (was.zmin, was.zmax) == (drawn.zmin, drawn.zmax), "one colour, one rate"
    assert (difference.zmin, difference.zmax) == (-0.5, 0.5)
    crosses = [(set(zip(trace.x, trace.y, strict=True))) for trace in figure.select_traces({"mode": "markers"})]
    assert crosses == [{(1, 3), (3, 1)}] * 3, "the diagonal is no pair"
    numbers = [list(trace.text) for trace in figure.select_traces({"mode": "text"})]
    assert numbers[0][2] == "80" and numbers[2][2] == "−50" and numbers[2][1] == "0"
    assert "<b>" not in str(figure.to_dict()["data"]), "names of hosts are no markup"
    met = pair_rates(pairs_of(2, 2, matrix(4, 2)), dark=True)
    assert met.layout.title.text == "All 6 measured pairs are met within 0.1 %"


@pytest.mark.parametrize(("hosts", "of_a_host"), [(1, 2), (2, 1), (1, NUMBERED_GPUS + 1), (40, 8), (MOST_GPUS, 1)])
def test_every_size_is_drawn_and_stays_small(hosts, of_a_host):
    count = hosts * of_a_host
    figure = pair_rates(pairs_of(hosts, of_a_host, matrix(count, of_a_host)), dark=False)
    assert len(figure.to_json()) < 10e6
    ticks = figure.layout.xaxis.tickvals
    assert 1 <= len(ticks) <= 16 and ticks[0] == 0
