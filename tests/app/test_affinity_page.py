"""The Affinity page in every state it can be met in, without a browser, and its charts: strongest path, GPUs, capped sizes."""

import json

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app.charts import affinity as charts
from engine import store
from engine.catalogue import cluster_presets
from engine.compare.affinity import OutOfDistribution, SamplePoint, TokensEnough
from engine.workload import ExpertLoad, RoutingTrace, Workload
from tests.cases.pages import buttons, pick, press, run_the_job, said, titles, visit
from tests.cases.samples import sample as sample_of
from tests.cases.sessions import open_plan, open_recording
from tests.strategies import make_model

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def app(sample: AppTest) -> AppTest:
    """The sample, opened."""
    return sample


def metrics(app: AppTest) -> list[tuple[str, str]]:
    return [(metric.label, metric.value) for metric in app.metric]


def open_fitting(app: AppTest, workload: Workload) -> None:
    """Open a recording and a model that fits it."""
    app.session_state["model"] = make_model(workload.layers, workload.num_experts, workload.k or 1)
    open_recording(app, workload)


def test_the_sample_under_the_linear_placement_any_two_layers_and_play(app: AppTest) -> None:
    visit(app, "affinity")
    names = ("On GPU", "Upper bound", "By chance", "On node", "Upper bound", "By chance")
    assert metrics(app) == list(zip(names, ("11 %", "45 %", "12 %", "23 %", "67 %", "25 %"), strict=True))
    assert "a linear placement" in said(app.caption)
    assert titles(app)[0] == "Expert 5 sends 59 % of its 229 tokens to expert 6"
    pick(app, "affinity-values", "Counts")
    assert titles(app)[0].startswith("The busiest path, expert ")
    pick(app, "affinity-order", "Grouped by GPU")
    assert titles(app)[0].endswith("of tokens stay on their GPU (layers 0 and 1)")
    app.slider[0].set_range(2, 5).run()
    assert "on one GPU in both layers (layers 2 and 5)" in titles(app)[0]
    app.toggle(key="affinity-play").set_value(True)
    for layers in ("layers 3 and 6", "layers 4 and 7", "layers 0 and 3"):
        assert layers in titles(app.run())[0] and not app.slider
    app.toggle(key="affinity-play").set_value(False).run()
    assert app.slider[0].value == (0, 3) and "layers 0 and 3" in titles(app)[0]
    app.slider[0].set_range(6, 6).run()
    assert "layers 6 and 7" in titles(app)[0] and not app.exception


def test_an_exflow_plan_keeps_more_and_its_own_note_is_shown(app: AppTest) -> None:
    plan = open_plan(app, "exflow", {"time_limit": 1.0})
    visit(app, "affinity")
    kept, limit, chance = (float(value.rstrip(" %")) for _, value in metrics(app)[:3])
    assert chance < 30 < kept <= limit
    assert f"the open plan, {plan.name}" in said(app.caption) and "of hops stay on their GPU" in said(app.caption)


def test_a_plan_with_replicas_is_scored_by_expectation_and_one_that_does_not_fit_gives_way(app: AppTest) -> None:
    plan = open_plan(app, "eplb", {})
    assert not plan.placement.single
    visit(app, "affinity")
    pick(app, "affinity-order", "Grouped by GPU")
    assert "expected share" in said(app.caption)
    share, trace = plan.placement.share, store.load_workload(app.session_state["workload"]).experts[:, :, 0]
    kept = [share[pair, trace[:, pair]] * share[pair + 1, trace[:, pair + 1]] for pair in range(7)]
    assert metrics(app)[0] == ("On GPU", f"{np.sum(kept) / (7 * len(trace)):.0%}".replace("%", " %"))

    app.session_state["cluster"] = cluster_presets()["exflow-4-nodes"].cluster
    text = next(line for line in said(app.run().caption).split(" | ") if "Grouped and scored" in line)
    assert "a linear placement: " in text and "is for 8 GPUs, but there are 16" in text
    assert metrics(app)[2] == ("By chance", "6.2 %")

    app.session_state["cluster"] = cluster_presets()["hgx-h100-4-nodes"].cluster
    assert "16 experts do not divide by 32 GPUs" in said(app.run().info)
    assert ("Upper bound", "45 %") not in metrics(app) and "Run the study" not in buttons(app)


def test_recordings_without_hops_say_what_to_open_and_two_layers_need_no_slider(app: AppTest) -> None:
    press(visit(app, "workload"), "Traffic 8 × 8")
    visit(app, "affinity")
    assert "not the path of each token" in app.info[0].value and not titles(app)
    rng = np.random.default_rng(0)
    for recording, reason in (
        (ExpertLoad("loads", np.ones((4, 16)), (0, 1, 2, 3)), "not the path of each token"),
        (RoutingTrace("one", np.zeros((64, 1, 1), dtype=np.int16), 16), "single MoE layer"),
        (RoutingTrace("blank", np.full((64, 3, 1), -1, dtype=np.int16), 16), "no hops"),
        (RoutingTrace("two", rng.integers(0, 16, (64, 2, 1)).astype(np.int16), 16), None),
    ):
        open_fitting(app, recording)
        app.run()
        assert not app.exception and (reason is None or reason in app.info[0].value)
        assert len(titles(app)) == (3 if reason is None else 0)
    assert not app.slider and not app.toggle


def test_choices_of_top_k_count_singly_or_in_pairs_and_of_two_models_the_first_is_shown(app: AppTest) -> None:
    first = app.session_state["workload"]
    press(visit(app, "workload"), "Beta on prose")
    second, model = app.session_state["workload"], app.session_state["model"]
    visit(app, "affinity")
    singly = metrics(app)
    assert "tokens to expert" in titles(app)[0]
    pick(app, "affinity-hops", "All choices")
    assert "pairs of choices to expert" in titles(app)[0] and metrics(app) != singly
    pick(app, "affinity-hops", "First choices")
    press(visit(app, "workload"), "Alpha on code")
    app.session_state["second"], app.session_state["model_of"] = second, {second: model}
    visit(app, "affinity")
    assert app.session_state["workload"] == first and not app.error
    assert titles(app)[0] == "Expert 5 sends 59 % of its 229 tokens to expert 6"


def test_choices_sorted_by_id_all_count_unless_a_person_insists(app: AppTest) -> None:
    rng = np.random.default_rng(0)
    experts = np.sort(np.argsort(rng.random((200, 3, 16)), axis=2)[:, :, :4], axis=2).astype(np.int16)
    open_fitting(app, RoutingTrace("sorted", experts, 16))
    visit(app, "affinity")
    assert "pairs of choices" in titles(app)[0]
    assert "All choices count because" in said(app.caption)
    pick(app, "affinity-hops", "First choices")
    assert "tokens" in titles(app)[0]


def test_a_study_runs_with_samples_and_is_not_shown_for_other_recordings(app: AppTest) -> None:
    open_recording(app, sample_of("alpha-code").spread(250), alone=True)  # few tokens, so that few samples are planned from
    visit(app, "affinity")
    options = app.multiselect(key="affinity-others").options
    assert "Alpha on prose (sample)" in options and not any("Beta" in option for option in options)
    app.multiselect(key="affinity-others").select("tiny-moe/alpha-prose.npz").run()
    job = run_the_job(app, "Run the study", "affinity")
    assert app.session_state["study_jobs"] == {"affinity": job.id}
    assert len(titles(app)) == 5 and "tokens" in titles(app)[3] and "Plans from elsewhere" in titles(app)[4]
    assert "alpha-prose" in app.session_state["workloads"].values()
    assert app.multiselect(key="affinity-others").value == job.request.arguments["others"]
    for view in ("own", "row"):
        pick(app, "affinity-numbers", view)
        assert len(titles(app)) == 5
    press(visit(app, "workload"), "Alpha on man pages")
    assert len(titles(visit(app, "affinity"))) == 3
    assert "another recording" in said(app.info)


COUNTS = np.array([[2.0, 2, 0, 0], [0, 8, 1, 1], [0, 0, 0, 9], [30, 30, 30, 10]])


def test_a_heatmap_names_the_surest_successor_or_the_busiest_way() -> None:
    assert charts.heatmap(COUNTS, (2, 3), True).layout.title.text == "Expert 2 sends 100 % of its 9 tokens to expert 3"
    busiest = "The busiest path, expert 3 to expert 0, takes 24 % of tokens"
    assert charts.heatmap(COUNTS, (2, 3), False).layout.title.text == busiest
    assert charts.heatmap(np.array([[0.0, 4.0], [60, 40]]), (0, 1), True).layout.title.text.startswith(
        "Expert 1 sends 60 % of its 100 tokens"
    )
    assert charts.heatmap(np.zeros((4, 4)), (0, 1), True).layout.title.text == "No tokens pass between layers 0 and 1"


def test_rows_of_a_probability_heatmap_add_up_to_a_hundred_per_cent() -> None:
    figure = charts.heatmap(np.vstack([COUNTS[:3], np.zeros(4)]), (0, 1), True)
    assert figure.data[0].z[:3].sum(axis=1) == pytest.approx(100)
    assert np.isnan(figure.data[0].z[3]).all()
    assert charts.heatmap(COUNTS, (0, 1), False).data[0].z.sum() == COUNTS.sum()


def test_grouping_moves_what_stays_into_framed_blocks() -> None:
    rows, columns = np.array([1, 0, 1, 0]), np.array([0, 1, 0, 1])
    figure = charts.heatmap(COUNTS, (0, 1), False, gpus=(rows, columns), kept=0.25)
    assert figure.data[0].customdata[:, 0, 0].tolist() == [1, 3, 0, 2]
    assert figure.data[0].customdata[0, :, 1].tolist() == [0, 2, 1, 3]
    framed = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    inside = 0.0
    for frame in framed:
        down, across = (slice(int(low + 0.5), int(high + 0.5)) for low, high in ((frame.y0, frame.y1), (frame.x0, frame.x1)))
        inside += figure.data[0].z[down, across].sum()
    stays = sum(COUNTS[i, j] for i in range(4) for j in range(4) if rows[i] == columns[j])
    assert len(framed) == 2 and inside == stays
    assert figure.layout.title.text == "25 % of tokens stay on their GPU (layers 0 and 1)"
    assert figure.layout.xaxis.ticktext == ("GPU 0<br>0, 2", "GPU 1<br>1, 3")


def test_a_gpu_without_experts_of_a_layer_has_no_block() -> None:
    figure = charts.heatmap(COUNTS, (0, 2), True, gpus=(np.array([0, 0, 2, 2]), np.array([1, 1, 2, 2])), kept=0.5)
    assert len([shape for shape in figure.layout.shapes if shape.type == "rect"]) == 1
    assert "on one GPU in both layers" in figure.layout.title.text


@pytest.mark.parametrize("experts, gpus", [(1, 1), (16, 8), (256, 64)])
def test_heatmaps_of_any_size_are_small_enough_to_send(experts: int, gpus: int) -> None:
    counts = np.random.default_rng(0).gamma(0.3, size=(experts, experts))
    place = np.arange(experts) % gpus
    figure = charts.heatmap(counts, (0, 1), True, gpus=(place, place), kept=0.1)
    assert len(figure.to_json()) < 2.5e6
    assert len(figure.layout.xaxis.ticktext) <= 16


def test_paths_are_capped_say_so_and_tell_what_stays() -> None:
    rng = np.random.default_rng(1)
    counts = rng.gamma(0.5, size=(3, 32, 32))
    place = np.array([rng.permutation(32) % 8 for _ in range(4)])
    figure = charts.paths(counts, 4, place)
    link, node = figure.data[0].link, figure.data[0].node
    assert len(link.value) == charts.MOST_LINKS
    assert min(link.value) == pytest.approx(np.sort(counts, axis=None)[-charts.MOST_LINKS])
    assert figure.layout.title.text.startswith(f"{charts.MOST_LINKS} strongest of 3,072 paths: ")
    gpu = [int(text.rsplit(" ", 1)[1]) for text in node.customdata]
    for source, target, colour in zip(link.source, link.target, link.color, strict=True):
        assert (gpu[source] == gpu[target]) == ("0,137,123" in colour)
    assert all(text.startswith(f"expert {label}") for text, label in zip(node.customdata, node.label, strict=True) if label)
    assert all(0 < height < 1 for height in node.y) and node.customdata[0].endswith(f"GPU {min(gpu)}")


def test_paths_of_nothing_and_of_two_layers() -> None:
    place = np.zeros((2, 4), dtype=int)
    assert "No paths" in charts.paths(np.zeros((1, 4, 4)), 0, place).layout.title.text
    assert charts.paths(COUNTS[None], 0, place).layout.title.text == "All 10 paths: 100 % of hops stay"


def test_kept_by_pair_names_the_best_and_the_worst_pair() -> None:
    figure = charts.kept_by_pair(np.array([0.2, np.nan, 0.5]), np.array([0.4, np.nan, 0.6]), 0.125)
    assert figure.layout.title.text == "50 % stay from layer 2 to 3, only 20 % from 0 to 1"
    assert [trace.name for trace in figure.data] == ["this placement", "upper bound (proven)", "by chance, 12 %"]
    assert figure.layout.yaxis.range[1] > 60
    assert charts.kept_by_pair(np.array([np.nan]), None, 0.1).layout.title.text == "No hops between layers"
    assert charts.kept_by_pair(np.array([0.3]), None, 0.1).layout.title.text == "30 % stay from layer 0 to 1"


def curve(*kept: float, linear: float = 0.1, complete: bool = True) -> TokensEnough:
    points = tuple(SamplePoint(100 * 10**i, 0, share) for i, share in enumerate(kept))
    return TokensEnough(8, True, "tokens", 100 * 10 ** (len(kept) - 1), 900, linear, 0.6, 0.5, points, complete)


def test_the_curve_of_tokens_says_how_many_are_enough() -> None:
    for middle, last, title in (
        (0.49, 0.5, "1,000 tokens get 98 % of what all 10,000 gain"),
        (0.3, 0.5, "All 10,000 tokens are needed"),
        (0.51, 0.5, "gain as much as all 10,000"),
    ):
        assert title in charts.tokens_enough(curve(0.2, middle, last)).layout.title.text
    assert "beats linear" in charts.tokens_enough(curve(0.1, 0.1, 0.09)).layout.title.text
    figure = charts.tokens_enough(curve(0.2, 0.49, complete=False))
    assert figure.layout.title.text == "2 plans so far"
    text = " ".join(annotation.text for annotation in figure.layout.annotations)
    assert "at most (proven), 60 %" in text and "linear blocks, 10 %" in text and "itself, 50 %" in text
    assert charts.tokens_enough(TokensEnough(8, True, "tokens", 1000, 900, 0.1, 0.6)).layout.title.text == "0 plans so far"


def moved(kept: tuple, names: tuple[str, ...] = ("one", "<b>two</b>")) -> OutOfDistribution:
    count = len(names)
    return OutOfDistribution(8, True, names, (5,) * count, (5,) * count, (0.1,) * count, kept)


def test_the_matrix_shows_every_number_in_every_view() -> None:
    study = moved(((0.4, 0.2), (0.3, 0.25)))
    shown = charts.out_of_distribution(study)
    assert shown.data[0].zmin == 0 and shown.data[0].zmax == pytest.approx(np.max(shown.data[0].z))
    assert shown.data[1].text == ("40 %", "20 %", "30 %", "25 %", "10 %", "10 %")
    assert shown.layout.title.text == "Plans from elsewhere keep 0.75× to 0.8× the own plan's"
    assert "<b>" not in str(shown.to_dict())
    assert charts.out_of_distribution(study, "own").data[1].text == ("1.000", "0.800", "0.750", "1.000")
    assert charts.out_of_distribution(study, "row").data[1].text == ("1.000", "0.500", "1.200", "1.000")
    same = moved(((0.4, 0.2), (0.4, 0.2)))
    assert "holds everywhere" in charts.out_of_distribution(same).layout.title.text


@pytest.mark.parametrize("view", ["share", "own", "row"])
@pytest.mark.parametrize("kept", [(), ((0.4, 0.2),), ((0.0, 0.0), (0.0, 0.0))])
def test_a_matrix_that_is_not_full_or_keeps_nothing_can_be_drawn(view: str, kept: tuple) -> None:
    figure = charts.out_of_distribution(moved(kept), view, dark=True)
    json.loads(figure.to_json())
    if len(kept) < 2:
        assert figure.layout.title.text == f"{len(kept)} of 2 plans made so far"


def test_one_cell_far_above_the_others_does_not_hide_them() -> None:
    counts = np.random.default_rng(0).integers(90, 110, (64, 64)).astype(float)
    assert charts.heatmap(counts, (0, 1), False).data[0].zmax == counts.max()
    counts[3, 5] = 1e5
    (heatmap,) = charts.heatmap(counts, (0, 1), False).data
    assert (
        heatmap.zmin == 0
        and heatmap.zmax < 110
        and heatmap.z.max() == 1e5
        and heatmap.colorbar.title.text == "tokens, 109 and more in one colour"
    )
