"""The brief of a plan and the report made of it: figures held against counts, and people's text kept as text."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from app.charts import review as charts
from app.charts.gantt import fewer_lanes
from app.review import compare, plan_list, report
from app.review import store as review_store
from app.review.brief import Brief, brief_of, cost_in_words, launches_in_words, risk_in_words, words
from app.review.report import Dossier
from engine import formats
from engine.catalogue import cluster_presets
from engine.compare.standing import Risk
from engine.compare.verdict import Verdict, verdict_of
from engine.compare.wording import WORDS
from engine.costs import Datasheet
from engine.plan import Offload, OrderMode, Overlap, PartitionRange, Pipeline, Placement, Plan, Priority, Schedule, SendOrder
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.store.team import Comment, Decision, Review, Run, SavedPlan
from engine.systems import SYSTEMS, TRAINING, run
from engine.timeline import over_layers
from engine.training import usual_step
from engine.units import seconds, share, signed, size
from engine.workload import RoutingTrace
from tests.cases.cli import SAMPLES
from tests.cases.samples import sample_problem
from tests.cases.training import plan_of, problem_of


def with_risks(brief: Brief, others: list[RoutingTrace]) -> Brief:
    """The brief, held out on these recordings."""
    risks = []
    for other in others:
        there = brief.problem.with_workload(other)
        risks.append(Risk(other.name, *(simulate(scored.plan, there).total for scored in (brief.own, brief.baseline))))
    ranked = tuple(sorted(risks, key=lambda risk: risk.gain))
    return replace(brief, standing=replace(brief.standing, risks=ranked))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return sample_problem("alpha-code", tokens=None, cluster=cluster_presets()["mixed-8"].cluster)


@pytest.fixture(scope="module")
def plans(problem: Problem) -> list[Plan]:
    """A linear plan and one that sends shortest first."""
    return [run(SYSTEMS[name], problem).result.solution for name in ("linear", "sjf")]


def test_the_worst_recording_is_the_one_with_the_least_gain(problem: Problem, plans: list[Plan]) -> None:
    trace = problem.workload
    others = [RoutingTrace(name, (trace.experts + shift) % 16, 16) for name, shift in (("by 3", 3), ("by 8", 8))]
    linear, ours = plans
    brief = with_risks(brief_of(ours, problem), others)
    gains = {}
    for other in others:
        deployed, total = (simulate(plan, problem.with_workload(other)).total for plan in (linear, ours))
        gains[other.name] = pytest.approx(deployed / total)
    assert {risk.recording: risk.gain for risk in brief.risks} == gains
    assert [risk.gain for risk in brief.risks] == sorted(risk.gain for risk in brief.risks)
    assert brief.risks[0].recording in risk_in_words(brief)


def test_the_load_of_every_gpu_is_counted_token_by_token(problem: Problem, plans: list[Plan]) -> None:
    plan = plans[0]
    figure = charts.placement(plan, problem)
    counted = np.zeros((8, 8))
    for layer in range(8):
        for expert in problem.workload.experts[:, layer, 0]:
            counted[layer, int(plan.placement.gpu_of_expert[layer, expert])] += 1
    load = counted / counted.mean(axis=1, keepdims=True)
    assert np.allclose(np.array(figure.data[0].z), load)
    layer, gpu = np.unravel_index(load.argmax(), load.shape)
    assert figure.layout.title.text.startswith(f"GPU {gpu} serves") and f"in layer {layer}:" in figure.layout.title.text
    assert figure.data[0].zmin == pytest.approx(load.min()), "the map shows the spread"
    assert charts.evenly_loaded(load) is None
    assert charts.evenly_loaded(1 + (load > 1) * 0.01) == "Every GPU serves the mean of every layer, at most 1.0 % off."


def test_of_many_gpus_those_are_drawn_that_the_others_wait_for(problem: Problem, plans: list[Plan]) -> None:
    node = problem.cluster.nodes[0]
    nodes = tuple(node.model_copy(update={"name": f"node {number}"}) for number in range(20))
    many = problem.cluster.model_copy(update={"nodes": nodes})
    large = make_problem(problem.workload, many, problem.model, Datasheet())
    whole, other = (run(SYSTEMS[name], large, {}).timeline for name in ("linear", "random"))
    parts, kept = fewer_lanes({"a": whole, "b": other}, 2, 3, charts.MOST_GPUS)
    part, beside = parts.values()
    assert part.resources == beside.resources, "lane by lane the same GPUs"
    assert kept >= charts.MOST_GPUS and len(part.resources) == 40 and sorted(part.resources) == sorted(whole.resources)
    lanes = [whole.resources.index(name) for name in part.resources]
    was = whole.events.loc[part.events.index]
    assert [lanes[lane] for lane in part.events["resource"]] == was["resource"].tolist()
    sends = part.events["peer"] >= 0
    assert [lanes[lane] for lane in part.events["peer"][sends]] == was["peer"][sends].tolist()
    for drawn, all_of_it in ((part, whole), (beside, other)):
        kept_ends, ends = (
            timeline.events.groupby(["layer", "kind"])["end"].max().loc[[2, 3], ["dispatch", "ffn", "combine"]]
            for timeline in (drawn, all_of_it)
        )
        assert kept_ends.equals(ends)
    figure = charts.timelines({"a": whole, "b": whole}, (2, 3))
    assert "16 of 40 GPUs" in figure.layout.title.text and figure.layout.height < 1200
    small = simulate(plans[0], problem)
    assert fewer_lanes({"small": small}, 0, 1, charts.MOST_GPUS) == ({"small": small}, 8)


def test_the_difference_of_two_placements() -> None:
    ours = Placement(experts=2, experts_of_gpu=(((0,), (1,)), ((0,), (1,))), model_layers=(0, 1))
    theirs = Placement(experts=2, experts_of_gpu=(((1,), (0,)), ((0, 1), (1,))), model_layers=(0, 1))
    swapped = charts.difference(ours, theirs, ("a", "<b>"), 0)
    assert np.array_equal(swapped.data[0].z, [[-1, 1], [1, -1]])
    assert swapped.layout.title.text == "In layer 0, 2 expert copies sit on other GPUs in &lt;b&gt;"
    assert np.array_equal(charts.difference(ours, theirs, ("a", "b"), 1).data[0].z, [[0, 0], [0.5, -0.5]])
    assert np.array_equal(charts.difference(ours, theirs, ("a", "b")).data[0].z, [[-0.5, 0.5], [0.75, -0.75]])
    assert "place every expert alike" in charts.difference(ours, ours, ("a", "b")).layout.title.text


def test_times_beside_each_other_name_the_faster_one() -> None:
    fast, slow = (SimpleNamespace(total=total) for total in (1e-3, 1.6e-3))
    assert charts.against({"a": fast, "b": slow}) == "a takes 1 ms, +60.0 % over b"
    assert charts.against({"b": slow, "a": fast}) == "a takes 1 ms, +60.0 % over b"
    assert charts.against({"a": fast, "b": fast}) == "a takes 1 ms, as fast as b"
    assert plan_list.gain_in_list(0.737) == "−26.3 %" and plan_list.gain_in_list(1.38) == "+38.0 %"
    assert compare._points(0.0164, 0.0156) == "+0.0 points"


def test_every_part_of_a_plan_has_its_sentence() -> None:
    twice = Placement(experts=2, experts_of_gpu=(((0, 1), (1,)),), model_layers=(0,))
    base = Plan(name="x", placement=twice, send_order=SendOrder(mode="concurrent"), provenance=Provenance(optimiser="x"))
    assert "1 of 2 with replicas (up to 2 copies); each GPU holds 1 to 2 experts per layer" in words(base, None)[0]
    assert "a plain all-to-all" in words(base, None)[1]
    phased = Schedule(src=(0,), dst=(1,), bytes=(1.0,), phase=(0,), duration=(1.0,))
    for mode in set(get_args(OrderMode)) - {"concurrent"}:
        order = SendOrder(mode=mode, dispatch=(phased,), combine=(phased,))
        assert words(base.model_copy(update={"send_order": order}), None)[1].startswith("Sends the bytes of every dispatch")
    step = base.model_copy(
        update={
            "priority": Priority(policy="priority", micro_op=3e7),
            "pipeline": Pipeline(forward=(2,), backward=(4,)),
            "overlap": Overlap(ranges=(PartitionRange(first="a", last="b", parts=4),), under={"dw": "a2a"}, irregular=True),
        }
    )
    text = " ".join(words(step, None))
    for part in ("2 parts forward and 4 backward", "1 stretch of", "1 weight-gradient operator under", "only real tokens"):
        assert part in text
    assert "pieces of at most 30 MB and wait for all-to-alls" in text
    assert "plain all-to-all" not in text


def test_numbers_that_databases_refuse_are_left_out() -> None:
    kept = review_store._finite({"a": [float("inf"), 1.5, {"b": float("nan")}], "c": (1, "x")})
    assert kept == {"a": [None, 1.5, {"b": None}], "c": [1, "x"]}


HOSTILE = "</script><script>alert('x')</script><img src=//evil.example/a.png onerror=alert(1)>\u2028&amp;\"'"


class Page(HTMLParser):
    """The tags with their attributes, scripts by kind and text that a browser finds."""

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
        *("r", saved, HOSTILE, HOSTILE, 1e9),
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


TAGS = (
    "html head meta title link style body header svg path rect main h1 h2 span p strong dl div dt dd ul li table tr th td "
    "figure script"
)
"""The only tags of a report."""


def nothing_runs(page: Page) -> None:
    assert {tag for tag, _ in page.tags} == set(TAGS.split())
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert not any("<" in text or "\u2028" in text for text in page.scripts["application/json"])


def test_what_people_wrote_is_text(page: Page) -> None:
    nothing_runs(page)
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


def bare(text: str) -> str:
    """Without the space between the elements of a page."""
    return "".join(text.split())


def test_the_verdict_is_in_it_and_names_in_it_are_text(dossier: Dossier, verdict: Verdict) -> None:
    assert len(verdict.parts) == 2
    judged = Page(report.html(replace(dossier, verdict=verdict, judged_at=1e9)))
    section = judged.text.partition("Worth it?")[2].partition("What it does")[0]
    assert bare(section).startswith(bare(f"{WORDS[verdict.verdict]}{verdict.reasons[0]}"))
    figures = [
        f"Gain held out, 95 % interval {signed(verdict.gain_low)} to {signed(verdict.gain_high)}",
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
    nothing_runs(judged)


def test_a_verdict_that_held_nothing_out(dossier: Dossier) -> None:
    problem, plan = dossier.brief.problem, dossier.brief.own.plan
    unrepeatable = plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"optimiser": "by hand"})})
    verdict = verdict_of(unrepeatable, problem, [problem.workload])
    assert verdict.verdict == "cannot-say" and not verdict.parts
    page = Page(report.html(replace(dossier, verdict=verdict, judged_at=1e9)))
    assert "cannot say yet" in page.text and "Nothing was held out" in page.text
    assert "interval" not in page.text and "None" not in page.text and "unknown" in page.text
    assert len(page.scripts["application/json"]) == 4


def test_only_two_scripts_run_and_nothing_is_fetched_from_anywhere(page: Page, dossier: Dossier) -> None:
    assert len(page.scripts["code"]) == 2 and set(page.scripts) == {"code", "application/json"}
    policy = next(attributes["content"] for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes)
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts["code"]}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests
    assert "default-src 'none'" in policy and "http" not in policy
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
        assert chart["data"] and chart["layout"]["width"] == report.WIDTH and chart["layout"]["paper_bgcolor"] == "#FFFFFF"
        assert "<img" not in json.dumps(chart) and "<script" not in json.dumps(chart)


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
    for part in (*brief.words, *sentences, *identifiers, "This plan has not been judged yet."):
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


def test_launches_say_how_far_the_prediction_was_off():
    def run(measured: float | None, predicted: float | None = 2.0, place: str = "local") -> Run:
        return Run("1", "p", place, predicted, measured, {}, "ana", 0.0)

    for runs, says in (
        ([], "Not measured yet"),
        ([run(None)], "Not measured yet"),
        ([run(3.0)], "Launched on this machine: 3 s for 2 s predicted there, 1.5×."),
        ([run(1.0, place="testbed"), run(3.0)], "Launched on testbed: 1 s for 2 s predicted there, 0.5×; 2 launches, 0.5× to"),
    ):
        assert says in launches_in_words(runs)


def test_experts_in_the_hosts_memory_are_a_sentence() -> None:
    problem = problem_of()
    plan = plan_of(problem, offload=Offload(experts=2))
    (told,) = (sentence for sentence in words(plan, None) if "host" in sentence)
    assert told.startswith("Keeps 2 experts of every GPU and layer in the host's memory")
    assert not any("host" in sentence for sentence in words(plan.with_parts(offload=None), None))
