"""Clusters from the machine or from files: attached GPUs, saved topologies, and logs of measured pairs."""

import io
import sys
import zipfile
from itertools import combinations

import numpy as np
import pytest
import streamlit as st
import torch
from streamlit.testing.v1 import AppTest

from app.charts.trust import MOST_GPUS, NUMBERED_GPUS, pair_rates
from engine.cluster import Cluster, Node
from engine.costs.pair_cluster import PairCluster, held_against
from tests.cases.files import NODES, everywhere, pair_log, printed, two_nodes
from tests.cases.pages import answers, complaints, enter, press, said, studio, upload, visit
from tests.launch.nvml import GIB, Gpu, plug_in, switched
from tests.strategies import make_gpu

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
    plug_in(monkeypatch, [Gpu("NVIDIA H100 NVL", 94 * GIB, bus=at) for at in range(2)])
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
    logs = set_of_logs(device="AMD Instinct MI300X")
    drop(app, logs, "recordings")
    assert "choose the nearest GPU type on the Cluster page" in complaints(app)[0] and app.session_state["cluster"] is None
    drop(visit(app, "cluster"), logs)
    assert "'AMD Instinct MI300X' is not in the catalogue" in complaints(app)[0] and gpus(app) is None
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
