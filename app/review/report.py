"""The report on a plan: one HTML file with everything in it, which asks nothing of any other machine and prints well.

The template escapes texts of people. Only two scripts may run, named by their digests in the page's own policy; the content of
charts is data to them.
"""

import base64
import hashlib
import json
import re
import time
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from html import unescape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from app.charts import cluster as cluster_charts
from app.charts import review as charts
from app.charts.theme import CONFIG, ink, legible
from app.review import place, thresholds
from app.review.brief import Brief, bound_in_words, cost_in_words, headline, launches_in_words, named_pair, risk_in_words
from engine import units
from engine.compare.figures import proof_of_plan
from engine.compare.judge import interval
from engine.compare.verdict import Verdict
from engine.compare.wording import WORDS, break_even
from engine.goal import Goal
from engine.problem import Problem
from engine.provenance import input_digests
from engine.simulate import bound_of_plan
from engine.store.team import Comment, Decision, Review, Run, SavedPlan
from engine.systems.plan_names import in_words
from engine.timeline import Timeline, over_layers
from engine.workload import RoutingTrace, Workload

WIDTH = 960
"""Pixels of a chart; print shrinks it to a page."""
FOLDER = Path(__file__).parent
APP = FOLDER.parent
TEXT_FACE = "IBM Plex Sans, sans-serif"
HEADING_FACE = "Space Grotesk, IBM Plex Sans, sans-serif"
DECISIONS = {"approved": "approved it", "rejected": "rejected it", "reopened": "reopened it"}


@dataclass(frozen=True, eq=False)
class Dossier:
    """Everything in a report: a saved plan, its review if it has one, its brief, its measured runs, and its verdict if it has
    one, judged at so many seconds since the epoch; and, if a serving step is the goal, the timelines of it and of its baseline
    there."""

    saved: SavedPlan
    review: Review | None
    brief: Brief
    runs: tuple[Run, ...]
    verdict: Verdict | None = None
    judged_at: float | None = None
    served: tuple[Timeline, ...] = ()


def file_name(saved: SavedPlan) -> str:
    """A name that every file system takes."""
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', saved.name).strip('-')[:60] or 'plan'}-{saved.plan[:8]}.html"


def html(dossier: Dossier) -> str:
    """The report as HTML text."""
    folder = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    figures = [chart(figure) for figure in _figures(dossier)]
    plotly_js, draw_js = scripts()
    return folder.get_template("report.html.j2").render(
        saved=dossier.saved,
        review=dossier.review,
        brief=dossier.brief,
        standing=dossier.brief.standing,
        whose=dossier.review and dossier.review.whose_last,
        said=said(dossier.review, dossier.brief.problem),
        runs=dossier.runs,
        headline=headline(dossier.brief),
        bounds=bound_in_words(dossier.brief),
        cost=cost_in_words(dossier.brief),
        risk=risk_in_words(dossier.brief),
        measured=launches_in_words(dossier.runs),
        judged=judged(dossier),
        inputs=inputs(dossier.brief.problem),
        provenance=provenance(dossier.brief),
        figures=figures,
        units=units,
        over_layers=over_layers,
        moment=moment,
        made=time.time(),
        plotly_js=plotly_js,
        draw_js=draw_js,
        policy=_policy(plotly_js, draw_js),
        wordmark=Markup((APP / "wordmark.svg").read_text(encoding="utf-8")),
        faces=faces(),
        config=Markup(json.dumps(CONFIG)),
    )


def judged(dossier: Dossier) -> dict[str, Any] | None:
    """The verdict with its criteria in words, the intervals of its parts and its chart; None if there is none."""
    verdict = dossier.verdict
    if verdict is None:
        return None
    return {
        "verdict": verdict,
        "word": WORDS[verdict.verdict],
        "at": moment(dossier.judged_at),
        "criteria": thresholds.as_text(verdict.criteria).to_dict("records"),
        "intervals": [interval(part.gain, part.error, verdict.confidence) for part in verdict.parts],
        "spread": thresholds.spread(verdict) if verdict.parts else "",
        "break_even": break_even,
        "minutes": thresholds.minutes,
        "figure": chart(charts.gains(verdict)) if verdict.parts else None,
    }


def said(review: Review | None, problem: Problem) -> list[dict[str, str]]:
    """Comments and decisions, oldest first: person, time, action and words."""
    if review is None:
        return []
    return [
        {
            "by": entry.by,
            "at": moment(entry.at),
            "did": _did(entry, review, problem),
            "text": entry.text if isinstance(entry, Comment) else entry.reason,
        }
        for entry in sorted((*review.comments, *review.decisions), key=lambda entry: entry.at)
    ]


def _did(entry: Comment | Decision, review: Review, problem: Problem) -> str:
    if isinstance(entry, Comment):
        return "" if entry.place is None else f"about {place.title(entry.place, problem)}"
    whose = review.whose(entry)
    return DECISIONS[entry.verdict] + (f", {whose}" if whose else "")


def moment(at: float) -> str:
    """Seconds since the epoch as UTC, for readers anywhere."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def inputs(problem: Problem) -> list[tuple[str, str, str]]:
    """Role, name with its figures, and digest of everything that the plan was made from."""
    digests = input_digests(problem)
    rows = [("Workload", _recording(problem.workload), digests["workload"])]
    rows += [("Also planned for", _recording(other), other.digest) for other in problem.others]
    types = [gpu.type for gpu in problem.cluster.gpus]
    gpus = ", ".join(f"{types.count(gpu_type)} × {gpu_type}" for gpu_type in dict.fromkeys(types))
    rows.append(("Cluster", f"{problem.cluster.name}: {gpus} in {len(problem.cluster.nodes)} nodes", digests["cluster"]))
    rows.append(("Model", _model(problem), digests["model"]))
    if problem.goal is Goal.TWO_MODELS:
        rows.append(("Second workload", _recording(problem.second.workload), digests["workload_b"]))
        rows.append(("Second model", _model(problem.second), digests["model_b"]))
    if (step := problem.step) is not None:
        text = f"{step.batch:,} × {step.sequence_length:,} tokens on each GPU, routing {step.routing}, gate {step.gate}"
        rows.append(("Training step", text, digests["step"]))
    if problem.graph is not None:
        rows.append(("Operator graph", problem.graph.name, digests["graph"]))
    if problem.in_use is not None:
        rows.append(("Placement in use", f"{problem.in_use.gpus} GPUs", digests["in_use"]))
    rows.append(("Costs", problem.source_of_times(problem.travel), digests["cost"]))
    return rows


def _recording(workload: Workload) -> str:
    tokens = f"{workload.tokens:,} tokens × " if isinstance(workload, RoutingTrace) else ""
    return f"{workload.name}: {tokens}{workload.layers} MoE layers × {workload.num_experts} experts"


def _model(problem: Problem) -> str:
    model = problem.model
    sizes = f"d_model {model.d_model:,}, {model.experts} experts, top-{model.experts_per_token}"
    return f"{model.name}: {sizes}, {model.numbers_in_words}"


def provenance(brief: Brief) -> list[tuple[str, str]]:
    """The origin of the plan: enough to make it again."""
    plan, origin = brief.own.plan, brief.own.plan.provenance
    options = ", ".join(in_words(name, value, plan) for name, value in origin.options.items() if name != "spare")
    versions = ", ".join(f"{name} {value}" for name, value in origin.versions.items())
    rows = [
        ("Plan", plan.id),
        ("Optimiser", origin.optimiser),
        ("Options", options or "none"),
        ("Seed", str(origin.seed)),
        ("Made with", versions or "unknown"),
        ("Proof", proof_of_plan(plan, brief.own.figures).sentence),
    ]
    rows += [(f"{role.replace('_', ' ').capitalize()} digest", digest) for role, digest in origin.inputs.items()]
    if plan.parent:
        rows.append(("Derived from", plan.parent))
    return [*rows, ("Report drawn with", f"plotly {version('plotly')}")]


def _figures(dossier: Dossier) -> list[go.Figure]:
    brief = dossier.brief
    problem, pair = brief.problem, named_pair(brief)
    layers, bounds = None, None
    if dossier.served:
        pair = dict(zip(pair, dossier.served, strict=True))
    if problem.goal is not Goal.TRAINING:
        layers = charts.drawable(pair, 0, min(problem.workload.layers - 1, 1))
    if problem.goal is not Goal.TRAINING and not dossier.served:
        bounds = None if brief.own.figures.unbounded else {brief.own.plan.name: bound_of_plan(brief.own.plan, problem, *layers)}
    return [
        charts.timelines(pair, layers, bounds, title=headline(brief)),
        charts.placement(brief.own.plan, problem),
        cluster_charts.picture(problem.cluster),
    ]


def chart(figure: go.Figure) -> dict[str, Markup | str | int]:
    """A chart on white paper: its JSON without anything that could end a script, its title in words, its height."""
    figure = go.Figure(figure)
    figure.update_layout(
        template="plotly_white",
        width=WIDTH,
        autosize=False,
        font={"family": TEXT_FACE},
        title_font={"family": HEADING_FACE, "color": ink(dark=False)},
        paper_bgcolor="#FFFFFF",
        plot_bgcolor="#FFFFFF",
    )
    figure.update_yaxes(ticklabelstandoff=6, title_standoff=10)
    text = plotly.io.to_json(legible(figure, dark=False), validate=False, engine="json")
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return {"json": Markup(text), "title": unescape(figure.layout.title.text), "height": figure.layout.height}


DRAW = """
"use strict";
const config = JSON.parse(document.getElementById("config").textContent);
for (const place of document.querySelectorAll(".chart")) {
  const figure = JSON.parse(place.nextElementSibling.textContent);
  Plotly.newPlot(place, figure.data, figure.layout, config);
}
"""


@lru_cache(maxsize=1)
def scripts() -> tuple[Markup, Markup]:
    """plotly.js and the script that draws the charts with it."""
    return Markup(get_plotlyjs().replace("</script", "<\\/script")), Markup(DRAW)


@lru_cache(maxsize=1)
def faces() -> list[tuple[str, str, Markup]]:
    """The studio's typefaces: family, weights, and the file as a data address, since a report asks nothing of any machine."""
    config = tomllib.loads((APP / ".streamlit" / "config.toml").read_text(encoding="utf-8"))
    return [
        (
            face["family"],
            face["weight"],
            Markup(f"data:font/woff2;base64,{base64.b64encode((APP.parent / face['url']).read_bytes()).decode()}"),
        )
        for face in config["theme"]["fontFaces"]
    ]


@lru_cache(maxsize=1)
def _policy(*allowed: str) -> str:
    """Content security policy: these scripts, the page's own styles and pictures, and no request at all."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in allowed)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    parts = (
        "default-src 'none'",
        f"script-src {sources}",
        "style-src 'unsafe-inline'",
        "font-src data:",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(parts)
