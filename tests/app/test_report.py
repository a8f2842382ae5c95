"""The report: everything is in it, nothing is asked of any other machine, and what people wrote is text."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from app.review import report
from app.review.brief import brief_of, cost_in_words, risk_in_words, with_risks
from app.review.report import Dossier
from engine import formats
from engine.compare.verdict import Verdict, verdict_of
from engine.compare.wording import WORDS
from engine.costs import Datasheet
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.store.team import Comment, Decision, Review, Run, SavedPlan
from engine.systems import SYSTEMS, TRAINING, run
from engine.timeline import over_layers
from engine.training import usual_step
from engine.units import seconds, share, signed, size
from engine.workload import RoutingTrace
from tests.app.test_pages import ROOT

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>alert('x')</script><img src=//evil.example/a.png onerror=alert(1)>\u2028&amp;\"'"
SAMPLES = ROOT / "sample_traces"


class Page(HTMLParser):
    """What a browser would find: tags with their attributes, scripts by kind, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: dict[str, list[str]] = {}
        self.text, self._inside = "", ""
        self.feed(html)

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self._inside = dict(attributes).get("type", "code")

    def handle_endtag(self, tag) -> None:
        self._inside = ""

    def handle_data(self, data) -> None:
        if self._inside:
            self.scripts.setdefault(self._inside, []).append(data)
        else:
            self.text += data


def hostile_problem(**more) -> Problem:
    """The sample, everything in it named by somebody who means harm."""
    model = formats.read_model(SAMPLES / "tiny-moe-alpha.json").model_copy(update={"name": HOSTILE[:60]})
    trace = formats.read_workload(SAMPLES / "tiny-moe" / "alpha-code.npz", num_experts=model.experts)
    cluster = formats.read_cluster(SAMPLES / "mixed-8.json")
    node = cluster.nodes[0]
    gpus = tuple(gpu.model_copy(update={"type": HOSTILE[:60]}) for gpu in node.gpus)
    node = node.model_copy(update={"name": HOSTILE[:60], "gpus": gpus})
    cluster = cluster.model_copy(update={"name": HOSTILE[:60], "nodes": (node, *cluster.nodes[1:])})
    return make_problem(RoutingTrace(HOSTILE, trace.experts, 16), cluster, model, Datasheet(), **more)


def dossier_of(problem: Problem, plan: Plan) -> Dossier:
    others = [RoutingTrace(f"{HOSTILE} {shift}", (problem.workload.experts + shift) % 16, 16) for shift in (3, 8)]
    saved = SavedPlan(1, "w", plan.id, "f" * 64, HOSTILE[:100], HOSTILE, {}, {}, HOSTILE[:100], 1e9)
    review = Review(
        "r",
        saved,
        HOSTILE,
        HOSTILE,
        1e9,
        (Comment(HOSTILE, 1e9 + 60, f"first {HOSTILE}"),),
        (Decision(HOSTILE, 1e9 + 30, "rejected", f"reason {HOSTILE}"),),
    )
    runs = (
        Run("j", plan.id, HOSTILE, 0.002, 0.0031, {"device": HOSTILE}, HOSTILE, 1e9),
        Run("k", plan.id, "local", None, None, {}, "Ben", 2e9),
    )
    brief = with_risks(brief_of(plan.model_copy(update={"name": HOSTILE[:100]}), problem), others)
    return Dossier(saved, review, brief, runs)


@pytest.fixture(scope="module")
def dossier() -> Dossier:
    problem = hostile_problem()
    return dossier_of(problem, run(SYSTEMS["sjf"], problem, {}).result.solution)


@pytest.fixture(scope="module")
def page(dossier: Dossier) -> Page:
    return Page(report.html(dossier))


def test_what_people_wrote_is_text(page: Page) -> None:
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "link",
        "style",
        "body",
        "header",
        "svg",
        "path",
        "rect",
        "main",
        "h1",
        "h2",
        "span",
        "p",
        "strong",
        "dl",
        "div",
        "dt",
        "dd",
        "ul",
        "li",
        "table",
        "tr",
        "th",
        "td",
        "figure",
        "script",
    }
    assert {tag for tag, _ in page.tags} == allowed
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    for part in (f"first {HOSTILE}", f"reason {HOSTILE}", f"{HOSTILE} 8", HOSTILE[:100]):
        assert part in page.text


@pytest.fixture(scope="module")
def verdict(dossier: Dossier) -> Verdict:
    """On a plan with replicas, by time and on another recording, all named by somebody who means harm."""
    problem = dossier.brief.problem
    plan = run(SYSTEMS["eplb"], problem, {"redundant": 1, "algorithm": "eplb"}).result.solution
    plan = plan.model_copy(update={"name": HOSTILE[:100]})
    other = RoutingTrace(f"{HOSTILE} 5", (problem.workload.experts + 5) % 16, 16)
    deployed = dossier.brief.baseline.plan.model_copy(update={"name": HOSTILE[:100]})
    return verdict_of(plan, problem, [problem.workload, other], deployed)


@pytest.fixture(scope="module")
def judged(dossier: Dossier, verdict: Verdict) -> Page:
    return Page(report.html(replace(dossier, verdict=verdict, judged_at=1e9)))


def bare(text: str) -> str:
    """Without the space between the elements of a page."""
    return "".join(text.split())


def test_the_verdict_is_in_it(judged: Page, verdict: Verdict) -> None:
    assert len(verdict.parts) == 2
    section = judged.text.partition("Worth it?")[2].partition("What it does")[0]
    assert bare(section).startswith(bare(f"{WORDS[verdict.verdict]}{verdict.reasons[0]}"))
    figures = [
        f"Gain held out {signed(verdict.gain_held_out)}",
        f"95 % interval {signed(verdict.gain_low)} to {signed(verdict.gain_high)}",
        f"Persistence {share(verdict.persistence)}",
        f"{size(verdict.move_bytes)} in {seconds(verdict.move_seconds)}",
        f"Memory of replicas {size(verdict.memory_bytes)}",
        f"Judged 2001-09-09 01:46 UTC against what is deployed, {HOSTILE[:100]}",
        "gain held out",
        "at least 5.0 %",
        "at most 90 %",
        "no plan: experts in contiguous blocks",
    ]
    parts = [[part.part, signed(part.gain), seconds(part.seconds)] for part in verdict.parts]
    for expected in (*figures, *verdict.reasons, *(cell for part in parts for cell in part)):
        assert bare(expected) in bare(section), expected
    assert section.count("✓ passed") == sum(criterion.passed for criterion in verdict.criteria)
    assert section.count("✗ not passed") == sum(not criterion.passed for criterion in verdict.criteria)
    assert len(judged.scripts["application/json"]) == 5, "its chart beside the other three, and their settings"


def test_names_in_the_verdict_are_text(judged: Page, page: Page) -> None:
    assert {tag for tag, _ in judged.tags} == {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in judged.tags for name in attributes)
    for text in judged.scripts["application/json"]:
        assert "<" not in text and "\u2028" not in text


def test_a_verdict_that_held_nothing_out(dossier: Dossier) -> None:
    problem, plan = dossier.brief.problem, dossier.brief.own.plan
    unrepeatable = plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"optimiser": "by hand"})})
    verdict = verdict_of(unrepeatable, problem, [problem.workload])
    assert verdict.verdict == "cannot-say" and not verdict.parts
    page = Page(report.html(replace(dossier, verdict=verdict, judged_at=1e9)))
    assert "cannot say yet" in page.text and "Nothing was held out" in page.text
    assert "interval" not in page.text and "None" not in page.text and "unknown" in page.text
    assert len(page.scripts["application/json"]) == 4


def test_no_verdict_is_one_line(page: Page) -> None:
    assert "This plan has not been judged yet." in page.text


def test_only_two_scripts_run_and_the_page_names_them_and_forbids_every_request(page: Page) -> None:
    assert len(page.scripts["code"]) == 2 and set(page.scripts) == {"code", "application/json"}
    policy = next(
        attributes["content"] for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes
    )
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts["code"]}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests
    assert "default-src 'none'" in policy and "http" not in policy


def test_nothing_is_fetched_from_anywhere(page: Page, dossier: Dossier) -> None:
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "action"):
            assert attributes.get(name, "data:,") == "data:,", (tag, attributes)
    styles = re.findall(r"<style>.*?</style>", report.html(dossier), re.S)
    addresses = re.findall(r"url\([^)]{0,30}", styles[0])
    assert len(styles) == 1 and "@import" not in styles[0]
    assert len(addresses) == 2 and all(address.startswith('url("data:font/woff2;base64,') for address in addresses)


def test_charts_are_whole_and_their_names_are_no_markup(page: Page) -> None:
    *charts, config = [json.loads(text) for text in page.scripts["application/json"]]
    assert len(charts) == 3 and config["displaylogo"] is False
    for chart in charts:
        assert (
            chart["data"] and chart["layout"]["width"] == report.WIDTH and chart["layout"]["paper_bgcolor"] == "#FFFFFF"
        )
        assert "<img" not in json.dumps(chart) and "<script" not in json.dumps(chart)
    for text in page.scripts["application/json"]:
        assert "<" not in text and "\u2028" not in text


def test_everything_that_decides_is_in_it(page: Page, dossier: Dossier) -> None:
    brief, plan = dossier.brief, dossier.brief.own.plan
    sentences = (
        "Gain over Linear placement",
        f"Over layers: {over_layers(brief.own.figures.balance.factors)}",
        f"Linear placement: {over_layers(brief.baseline.figures.balance.factors)}",
        "No order of sends of this placement",
        "3.1 ms",
        "rejected",
        cost_in_words(brief),
        risk_in_words(brief),
    )
    identifiers = (plan.id, plan.provenance.optimiser, *plan.provenance.inputs.values())
    for part in (*brief.words, *sentences, *identifiers):
        assert part in page.text, part
    for name, value in plan.provenance.versions.items():
        assert f"{name} {value}" in page.text
    assert page.text.index("reason ") < page.text.index("first "), "what was said stands in its order"
    assert "2001-09-09 01:46 UTC" in page.text


def test_a_training_step_without_a_review(dossier: Dossier) -> None:
    problem = hostile_problem()
    problem = hostile_problem(step=usual_step(problem.model, 8))
    of_step = dossier_of(problem, run(TRAINING["lina"], problem, {}).result.solution)
    page = Page(report.html(Dossier(of_step.saved, None, of_step.brief, ())))
    assert "no review" in page.text and "Nobody has said anything" in page.text and "Training step" in page.text
    assert "Worth it?" not in page.text, "verdicts are on inference"
    assert "No launch of this plan has been measured" in page.text and len(page.scripts["application/json"]) == 4


@pytest.mark.parametrize(("name", "file"), [("Aurora", "Aurora"), ("../../x", "x"), ("</a>", "a"), ("日本", "plan")])
def test_the_file_has_a_name_that_every_system_takes(name: str, file: str) -> None:
    saved = SavedPlan(1, "w", "f" * 64, None, name, "", {}, {}, "Ana", 0.0)
    assert report.file_name(saved) == f"{file}-ffffffff.html"
