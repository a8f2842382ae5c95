"""The affinity charts name the strongest path, group by GPU and cap the number of cells."""

import json

import numpy as np
import pytest

from app.charts import affinity as charts
from engine.compare.affinity import OutOfDistribution, SamplePoint, TokensEnough

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
