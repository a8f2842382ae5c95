"""Every door for plans, in or out, refuses a broken one by one line that names the fault and its place."""

import json
import re
from pathlib import Path

import pytest
from sqlalchemy import update

from engine import store
from engine.errors import InputError
from engine.jobs import launches
from engine.jobs.kinds import answered
from engine.jobs.protocol import Context
from engine.launch.preparation.launch import Launch
from engine.plan import Plan
from engine.store import tables, team
from engine.store.database import database
from engine.store.problems import problem_arguments, save_inputs
from tests.cases.broken_plans import BROKEN, legal, problem
from tests.cases.cli import INPUTS, CommandLine
from tests.cases.pages import press, said, studio, visit
from tests.cases.reviews import link
from tests.cases.sessions import JOB, comes_from, session_with_plans

EVERYTHING = pytest.mark.everything


@pytest.fixture
def engine(capsys) -> CommandLine:
    return CommandLine(capsys)


def written(folder: Path, plan: dict, name: str = "sent.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(plan))
    return path


def broken(kind: str) -> tuple[dict, str]:
    make, says = BROKEN[kind]
    return make(), says


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("command", ["simulate", "compare", "launch"])
def test_the_command_line_refuses_a_broken_plan(engine, tmp_path, command, kind):
    plan, says = broken(kind)
    files = [written(tmp_path, plan)]
    if command == "compare":
        files.insert(0, written(tmp_path, legal(), "first.json"))
    save_inputs(problem())  # the studio remembers the inputs of a plan, its cluster too
    for inputs in (INPUTS, []):
        line = engine.refused(command, *files, *inputs)
        assert re.fullmatch(rf"error: sent\.json: (placement: )?{says}", line), line


def test_a_launch_that_knows_no_cluster_refuses_what_is_legal_on_none(engine, tmp_path):
    plan, says = broken("other bytes")
    assert re.search(says, engine.refused("launch", written(tmp_path, plan), *INPUTS[:2], *INPUTS[4:]))
    plan, _ = broken("no matching")
    line = engine.refused("launch", written(tmp_path, plan), *INPUTS[:2], *INPUTS[4:])
    assert line.endswith("at once, which is no matching")


@pytest.mark.parametrize("kind", ["no matching", "other bytes"])
def test_the_job_of_a_launch_refuses_a_broken_plan(tmp_path, kind):
    plan, says = broken(kind)
    inputs = problem()
    store.save_workload(inputs.workload)
    wanted = Launch((Plan.from_dict(plan, "plan"),), inputs.workload, inputs.model, inputs.cluster)
    with pytest.raises(InputError, match=rf"^the plan Aurora: {says}$"):
        answered(launches.launch, wanted.to_arguments(), Context(tmp_path))
    assert not (tmp_path / launches.RUN).exists()


# Pages


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> str:
    comes_from(None, monkeypatch)
    return team.add_workspace(database(), "Autumn", "Ana").id


def saved(workspace: str, plan: dict, name: str) -> str:
    """The id of a plan in the team's database, after its contents there were changed to these."""
    inputs = problem()
    save_inputs(inputs)
    fine = Plan.from_dict(legal() | {"name": name}, "plan")
    team.save_plan(database(), workspace, fine, "Ana", "", problem_arguments(inputs))
    changed = json.dumps(plan | {"name": name})
    with database().writing() as connection:
        connection.execute(update(tables.plan).where(tables.plan.c.id == fine.id).values(body=changed))
    return fine.id


@pytest.mark.parametrize(
    "kind", ["missing expert", "other bytes", *(pytest.param(kind, marks=EVERYTHING) for kind in ("shares", "no matching"))]
)
def test_a_page_refuses_a_broken_plan_that_the_team_saved(workspace, kind):
    plan, says = broken(kind)
    app = link(plan=saved(workspace, plan, f"broken: {kind}"))
    lines = said((*app.warning, *app.error))
    assert re.search(says, lines), lines
    assert app.session_state["plan"] is None
    if kind != "missing expert":  # of which there is no more to say
        press(app, "Open in this session")
        assert re.search(says, said(app.error)) and app.session_state["plan"] is None


def test_a_page_opens_a_legal_plan_that_the_team_saved(workspace):
    app = link(plan=saved(workspace, legal(), "legal"))
    assert not app.warning and not app.error and app.session_state["plan"] is not None


@pytest.mark.parametrize(
    ("page", "kind"),
    [("timeline", "no matching"), ("launch", "other bytes"), pytest.param("launch", "shares", marks=EVERYTHING)],
)
def test_a_page_refuses_a_broken_plan_of_the_session(own_data_folder, monkeypatch, page, kind):
    """As the result of its job was changed after it had been written."""
    comes_from(None, monkeypatch)
    token, (plan, _) = session_with_plans(own_data_folder, 0)
    result = own_data_folder / "jobs" / JOB / "result.json"
    data = json.loads(result.read_text())
    changed, says = broken(kind)
    data["candidates"] = [data["candidates"][0] | {"plan": changed}]
    result.write_text(json.dumps(data))
    (kept,) = (own_data_folder / "sessions").iterdir()
    identity = Plan.from_dict(changed, "plan").id
    kept.write_text(kept.read_text().replace(plan.id, identity))
    app = studio(session=token)
    visit(app, page)
    lines = said((*app.info, *app.error))
    assert re.search(says, lines), lines
    assert "Start" not in [button.label for button in app.button]
