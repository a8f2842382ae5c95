"""PipeMoE's grid: the chosen degrees against every degree walked part by part, and figures known from elsewhere."""

import numpy as np
import pytest

from engine.overlap.pipeline_degree import DegreeInstance, pipeline_degree
from engine.overlap.pipemoe_printed import pipemoe_printed
from engine.reproduce.pipemoe import MOST_PARTS, TABLE_VI, WHY_DIFFERENT, table_iv, table_vi
from tests.oracles.overlapping import check_pipeline

GPUS = (16, 32, 64)


def walked(instance: DegreeInstance, parts: int) -> np.ndarray:
    """float64[layer] seconds in so many parts on one network, dispatches first: equations 9-12, all layers at once."""
    comm = instance.alpha_comm + instance.beta_comm * instance.size_comm / parts
    comp = instance.alpha_comp + instance.beta_comp * instance.size_comp / parts
    network, compute, computed = np.zeros(instance.layers), np.zeros(instance.layers), []
    for _ in range(parts):
        network = network + comm
        compute = np.maximum(compute, network) + comp
        computed.append(compute)
    for ready in computed:
        network = np.maximum(network, ready) + comm
    return network


def test_no_degree_beats_the_chosen_one_on_the_whole_grid():
    for gpus in GPUS:
        instance = table_iv(gpus, only_runnable=False)
        assert instance.layers == 288
        result = pipeline_degree(instance)
        chosen = np.full(288, np.nan)
        least = np.full(288, np.inf)
        for parts in range(1, MOST_PARTS + 1):
            seconds = walked(instance, parts)
            least = np.minimum(least, seconds)
            chosen = np.where(result.solution == parts, seconds, chosen)
        assert (chosen <= least * (1 + 1e-12)).all()
        assert result.objective == pytest.approx(chosen.sum(), rel=1e-12) == pytest.approx(result.bound, rel=1e-12)
        for layer in range(0, 288, 37):
            comm, comp = (float(part[layer, 6]) for part in instance.parts(slice(None), 7))
            walk = check_pipeline([comm] * 7, [comp] * 7, [comm] * 7)
            assert walk == pytest.approx(walked(instance, 7)[layer], rel=1e-12)


def test_figures_of_another_implementation():
    """Fixed degrees against the exact one on the 522 layers, and the gap to the limit, from a separate prototype.

    It kept 522 layers of all sizes together, not 174 of each: six equally large ones fall on either side of the line.
    """
    seconds = np.concatenate([table_iv(gpus).time_of_degree() for gpus in GPUS])
    assert seconds.shape == (522, MOST_PARTS)
    least = seconds.min(axis=1)
    two, swept = seconds[:, 1] / least - 1, seconds[:, [0, 1, 3, 7]].min(axis=1) / least - 1
    assert (two.mean(), two.max()) == (pytest.approx(0.031, abs=5e-4), pytest.approx(0.36, abs=5e-3))
    assert (swept > 1e-12).mean() == pytest.approx(0.18, abs=5e-4)
    assert (swept.mean(), swept.max()) == (pytest.approx(0.0032, abs=5e-5), pytest.approx(0.089, abs=5e-4))
    limit = np.concatenate([table_iv(gpus).limit() for gpus in GPUS])
    assert (least / limit - 1).mean() == pytest.approx(0.078, abs=1e-3)


def test_table_vi_has_what_the_exact_degree_saves():
    table = table_vi()
    assert table.index.tolist() == [(gpus, degree) for gpus in GPUS for degree in (1, 2, 4, 8)]
    assert (table["mean"] >= 0).all() and (table["mean"] <= table["highest"]).all() and (table["highest"] < 1).all()
    assert table.loc[(32, 4), ["paper_mean", "paper_highest"]].tolist() == [*TABLE_VI[32][2]] == [0.061, 0.339]
    instance = table_iv(16)
    whole = walked(instance, 1)
    saved = 1 - np.array([walked(instance, parts) for parts in range(1, 60)]).min(axis=0) / whole
    assert table.loc[(16, 1), ["mean", "highest"]].tolist() == pytest.approx([saved.mean(), saved.max()])
    # Dearer start-ups of larger clusters: fewer parts pay.
    assert table["mean"].xs(1, level="degree").is_monotonic_decreasing
    assert table["mean"].xs(8, level="degree").is_monotonic_increasing
    assert "Algorithm 1" in WHY_DIFFERENT


def test_the_printed_rule_misses_on_its_own_grid():
    full = table_iv(16)
    few = slice(5, None, 12)
    columns = [full.alpha_comm, full.beta_comm, full.size_comm, full.alpha_comp, full.beta_comp, full.size_comp]
    instance = DegreeInstance(*(column[few] for column in columns), MOST_PARTS)
    printed, exact = pipemoe_printed(instance), pipeline_degree(instance)
    assert printed.bound == pytest.approx(exact.objective) and printed.objective > 1.001 * exact.objective
    assert 0 < (printed.solution != exact.solution).mean() < 1
