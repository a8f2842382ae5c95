"""A first visit: the welcome, the guide, and the words that pages explain."""

import ast
import functools
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app import samples, simulations, widgets
from app.charts.workload import gain
from app.tables import plain
from app.visitor.glossary import PAGES, STEPS, TERMS
from engine.jobs import runner
from engine.plan import Plan
from tests.app.conftest import Stored
from tests.cases.cli import ROOT
from tests.cases.pages import buttons, press, studio, visit

GAIN = samples.gain()


def welcomes(app: AppTest) -> bool:
    return "Plan the sample" in buttons(app)


@pytest.mark.clock
def test_the_gain_is_what_the_sample_gains(planned_session: Stored):
    (job,) = runner.jobs(planned_session[0], "optimise")
    plans = [Plan.from_dict(candidate["plan"], "plan") for candidate in job.result["candidates"]]
    by_system = {plan.provenance.optimiser: plan for plan in plans}
    linear, planned = by_system["linear"], by_system[GAIN["system"]]
    assert linear.send_order.mode == "concurrent" and linear.claim.objective == pytest.approx(GAIN["linear_seconds"])
    assert planned.claim.objective == pytest.approx(GAIN["seconds"], rel=1e-3)
    assert planned.claim.bound == pytest.approx(GAIN["bound"], rel=1e-3)


def test_the_chart_draws_both_times_and_the_bound():
    figure = gain(2e-3, 1.5e-3, 1.4e-3, "Aurora")
    assert [bar.x for bar in figure.data] == [(2e-3,), (1.5e-3,)] and "+33.3 %" in figure.layout.title.text
    assert "1.4 ms" in figure.layout.annotations[0].text and figure.layout.shapes[0].x0 == 1.4e-3


def test_a_newcomer_plans_the_sample_with_one_click(
    app: AppTest, planned_session: Stored, own_data_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(planned_session[0] / "jobs", own_data_folder / "jobs")
    (planned,), started = runner.jobs(own_data_folder, "optimise"), []
    monkeypatch.setattr(widgets, "start_job_on", lambda problem, *job: started.append(job) or planned)
    assert welcomes(app) and any("before you deploy it" in header.value for header in app.header)
    press(app, "Plan the sample")
    assert app.header[0].value == "Optimise" and "Plan it" in buttons(app)
    ((kind, asked),) = started
    assert (kind, asked["systems"]) == ("optimise", planned.request.arguments["systems"])
    assert len(app.run().dataframe[0].value) == 2 and app.session_state["plan_jobs"] == [planned.id]
    assert len(started) == 1, "it runs once"
    assert not welcomes(visit(app, "workload"))


def test_who_brings_a_recording_is_left_alone_and_a_sample_of_real_size_is_called_synthetic(
    app: AppTest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(samples, "LARGE", replace(samples.LARGE, tokens=256))
    monkeypatch.setattr(simulations, "FEW_SENDS", 10**6)  # so that no processes are started for a single look
    assert not guide(app)
    press(app, "Upload mine")
    assert not welcomes(app) and app.get("file_uploader") and not welcomes(app.run())
    press(app, "Beta on prose")
    assert not welcomes(app) and not guide(app), "nobody is guided with a recording of their own"
    press(app, "DeepSeek-R1 size (synthetic)")
    texts = [popover.proto.popover.label for popover in app.get("popover")]
    assert any(text.startswith("synthetic") for text in texts) and plain("DeepSeek-R1") in texts
    visit(app, "optimise")
    assert not app.error


def guide(app: AppTest) -> str:
    return next((caption.value for caption in app.caption if "**Guide" in caption.value), "")


def test_the_guide_speaks_of_what_is_open_and_asks_for_a_run_until_one_was_asked_for(sample: AppTest) -> None:
    assert "“alpha\\-code”." in guide(visit(sample, "workload"))
    assert "8 GPUs of 4 types:" in guide(visit(sample, "cluster"))
    press(sample, plain("hgx-h100-8"))
    assert "8 GPUs of 1 type:" in guide(sample)
    assert "Press Plan it: each plan" in guide(visit(sample, "optimise"))
    sample.session_state["plan_jobs"] = ["20250102T030405000006-0123abcd"]
    assert "Each plan has a proven bound" in guide(sample.run()) and "Press Plan it" not in guide(sample)
    press(visit(sample, "workload"), "Beta on prose")
    assert "“beta\\-prose”." in guide(sample)


def test_each_step_has_its_words_and_leads_to_the_next_and_the_end_is_kept(sample: AppTest) -> None:
    steps = [(title, *step) for title, step in STEPS.items()]
    assert " ".join(title for title, *_ in steps) == "Workload Cluster Affinity Optimise Timeline What-if Review Launch"
    for number, (title, file, sentence) in enumerate(steps, 1):
        visit(sample, file)
        assert sample.header[0].value == title
        assert f"{number} of 8" in guide(sample) and max(re.split(r"{\w+}", sentence), key=len) in guide(sample)
        links = {link.proto.label for link in sample.get("page_link")}
        leads = {link for link in links if link.startswith("Next: ")}
        assert leads == {f"Next: {after}" for after, *_ in steps[number : number + 1]}
        assert any(TERMS[PAGES[title][0]].meaning in markdown.value for markdown in sample.markdown), title
    visit(sample, "timeline")
    assert not guide(press(sample, "End guide"))
    again = studio(session=sample.query_params["session"])
    assert not guide(again.run()) and not again.exception
    assert not guide(visit(again, "cluster"))


PAPERS = ("Aurora", "ExFlow", "Lancet", "Lina", "PipeMoE")
ELSEWHERE = (
    "balancedness contention critical_path gap held_out knob overload_factor persistence rank roofline slot two-tier_order"
)
ELSEWHERE = {word.replace("_", " ") for word in ELSEWHERE.split()}
"""Words that none of the five papers has."""
SHOWN = {"Optimise": "systems", "Cluster": "costs", "Papers": "reproduce"}
"""Folders of the engine with texts about systems, options and sources that a page shows."""
COMMON = ("widgets", "glossary", "text", "state")
"""Modules that every page imports say nothing about a page."""


@functools.cache
def read(module: Path) -> tuple[set[Path], str]:
    """The modules of `app` that a module imports itself, and its strings without its docstrings."""
    nodes = list(ast.walk(ast.parse(module.read_text())))
    modules = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("app"):
            folder = ROOT.joinpath(*node.module.split("."))
            modules |= {folder.with_suffix(".py"), *(folder / f"{name.name}.py" for name in node.names)}
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    used = {module for module in modules if module.stem not in COMMON and module.exists()}
    return used, " ".join(text for text in texts if isinstance(text, str))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_uses_the_words_that_it_explains(page: str) -> None:
    waiting = [ROOT / "pages" / f"{page.lower().replace('-', '_')}.py"]
    modules: set[Path] = set()
    while waiting:
        modules.add(module := waiting.pop())
        waiting += read(module)[0] - modules
    if page in SHOWN:
        modules |= set((ROOT / "engine" / SHOWN[page]).rglob("*.py"))
    words = " ".join(read(module)[1] for module in modules)
    for name in PAGES[page]:
        assert any(re.search(rf"\b{re.escape(term)}", words, re.IGNORECASE) for term in (name, *TERMS[name].also)), name


def test_every_word_is_on_a_page_none_twice_explained_in_a_sentence_or_two_with_its_source() -> None:
    assert {name for names in PAGES.values() for name in names} == set(TERMS)
    assert all(len(set(names)) == len(names) for names in PAGES.values())
    for name, term in TERMS.items():
        assert 1 <= len(re.findall(r"\.(?:\s|$)", term.meaning)) <= 3 and term.meaning.endswith("."), name
        cited = [paper for paper in PAPERS if paper in term.source]
        assert cited or name in ELSEWHERE, name
        for paper in cited:
            numbers = "[IV]+" if paper in ("ExFlow", "PipeMoE") else r"\d"
            assert re.search(rf"{paper}[^;]*§{numbers}", term.source) or name in ELSEWHERE, name
