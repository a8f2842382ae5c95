"""The guide: the page and docs/recording.md show the same words, its figures are the estimate's, its commands exist."""

import json
import shlex
from pathlib import Path

import pytest

from engine.cli import parser
from engine.model import MoEModel
from engine.recording import GUIDES
from engine.recording.estimate import ESTIMATES, estimate
from engine.recording.guide import as_markdown
from engine.units import size

PAGE = Path(__file__).parents[2] / "docs" / "recording.md"
WAYS = {way.key: way for guide in GUIDES for way in guide.ways}
R1 = MoEModel(
    name="DeepSeek-R1", layers=61, dense_layers=(0, 1, 2), experts=256, experts_per_token=8, d_model=7168, d_ff=2048
)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_the_documentation_has_the_same_words(guide):
    assert as_markdown(guide) in PAGE.read_text(), f"docs/recording.md: put as_markdown of {guide.name} in its place"


def test_every_way_has_a_key_of_its_own_and_an_estimate():
    assert sum(len(guide.ways) for guide in GUIDES) == len(WAYS)
    assert set(WAYS) == set(ESTIMATES)


@pytest.mark.parametrize(
    ("way", "figure", "tokens", "passes", "ranks", "by_hand"),
    [
        ("sglang-stat", "62 MB", 0, 1000, 16, 1000 * 61 * 256 * 4),
        ("sglang-per-pass", "62 MB", 0, 1000, 1, 1000 * 61 * 256 * 4),
        ("sglang-per-token", "1952 bytes", 1, 0, 16, 61 * 8 * 4),
        ("sglang-answers", "2.6 kB", 1, 0, 1, 61 * 8 * 4 * 4 / 3),
        ("vllm-answers", "619 bytes", 1, 0, 1, 58 * 8 * 4 / 3),
        ("vllm-ascend-answers", "619 bytes", 1, 0, 1, 58 * 8 * 4 / 3),
        ("vllm-ascend-map", "68 kB", 0, 0, 1, 58 * (10 * 3 + 90 * 4 + 156 * 5)),
        ("tensorrt-llm", "95 MB", 0, 100, 8, 100 * 8 * 58 * 256 * 8),
        ("pytorch", "928 bytes", 1, 0, 1, 58 * 8 * 2),
    ],
)
def test_the_figures_are_the_estimate_s(way, figure, tokens, passes, ranks, by_hand):
    estimated = estimate(way, R1, tokens, passes, ranks)
    assert estimated.bytes == pytest.approx(by_hand)
    number, unit = figure.split()
    assert estimated.bytes == pytest.approx(float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[unit], rel=0.02)
    assert figure in " ".join(WAYS[way].size.split())


def test_megatron_s_json_is_as_long_as_estimated():
    """Against what Python's json writes for ids that are all equally frequent."""
    ids = [[(token * 8 + choice) % 256 for choice in range(8)] for token in range(256)]
    written = 58 * len(json.dumps(ids)) / 256
    assert estimate("megatron", R1, 1).bytes == pytest.approx(written, rel=0.01)
    assert f"{written / 1e3:.1f} kB" in WAYS["megatron"].size


def test_an_estimate_says_how_it_comes_about():
    estimated = estimate("sglang-answers", R1, tokens=100_000)
    assert estimated.sum == "100,000 tokens × 61 layers × 8 experts × 4 bytes × 4/3 in base64"
    assert size(estimated.bytes) == "260 MB"
    wide = R1.model_copy(update={"experts": 384})
    assert estimate("vllm-answers", wide, 1).bytes == 2 * estimate("vllm-answers", R1, 1).bytes


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.key)
def test_our_commands_can_be_typed(way):
    if way.ours:
        words = shlex.split(way.ours)
        assert words[:3] == ["python", "-m", "engine"]
        options = parser().parse_args(words[3:])
        assert bool(options.sglang) != bool(options.vllm)
