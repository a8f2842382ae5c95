"""Capacity on the What-if page: GPUs for users, machines for the recording, more GPUs like the open ones, and their prices."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from streamlit.testing.v1 import AppTest

from app.tables import as_csv
from app.what_if import capacity, prices, sizing
from engine import store
from engine.catalogue import cluster_presets, node_types
from engine.catalogue.packaged import cluster_of_machines, every_gpu_type
from engine.compare.capacity import CapacityPoint, hardware, parts_of
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import make_problem
from engine.serving.sizes import usual_serving
from engine.simulate import simulate
from engine.store.problems import problem_arguments
from engine.units import seconds, share
from engine.workload import ExpertLoad
from tests.cases import pages
from tests.cases.problems import small
from tests.cases.sessions import open_recording
from tests.strategies import make_model

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def page(small_recording: AppTest) -> AppTest:
    return small_recording


def asked(page: AppTest, question: str, **choices) -> AppTest:
    """A question of capacity, with choices as they are kept."""
    page.session_state["choices"] = choices
    return pages.ask_capacity(page, question)


# GPUs for users.


LEFT = {"gpu-prices": ["GB200", 10.5, False, "H100", 6.0, False, "H200", 3.0, True, "H9000", 1.0, True]}
"""Prices and ticks as they are kept, of B200 the list's."""


def test_gpu_types_are_compared_and_each_opens_as_a_cluster(page: AppTest) -> None:
    asked(page, "deployments", **LEFT, **{"deployment-most": 8})
    assert "it tries every division" in pages.said(page.info) and "Attention and vocabulary: assumed" in pages.said(
        page.caption
    )
    assert "a token in 20 ms (50 tokens/s a user)" in pages.said(page.caption), "the goal, as it was understood"
    job = pages.run_the_job(page, "Compare", "deployments")
    assert job.request.arguments["prices"] == {"B200": prices.LIST_PRICES["B200"], "H200": 3.0}
    points = job.result["points"]
    assert {row["deployment"]["gpu"] for row in points} == {"H200", "B200"} and all(row["gpus"] <= 8 for row in points)
    first, other = (next(row for row in points if row["deployment"]["gpu"] == gpu) for gpu in ("H200", "B200"))
    assert "have changed" not in pages.said(page.info)
    assert points[0] is first and f"**{job.result['decision']}**" in pages.said(page.markdown)
    assert job.result["decision"].startswith(f"{first['gpus']} H200 as ") and "The next GPU type: " in job.result["decision"]
    (title,) = pages.titles(page, "what-if-deployments")
    assert title.startswith(f"{first['gpus']} × H200, $") and title.endswith("the cheapest")
    name, most = max(first["parts"].items(), key=lambda part: part[1])
    (title,) = pages.titles(page, "what-if-deployment-parts")
    assert title.lower() == f"{name}: {share(most / first['token'])} of the {seconds(first['token'])} of a token".lower()
    table = next(each.value for each in page.dataframe if "A million tokens" in each.value)
    assert list(table["A million tokens"]) == [f"${row['million']:,.3f}" for row in (first, other)], "one row a type"
    pages.pick(page, "deployment-rows", "all")
    table = next(each.value for each in page.dataframe if "A million tokens" in each.value)
    assert list(table["A million tokens"]) == [f"${row['million']:,.3f}" for row in points]
    left_out = page.dataframe[-1].value
    assert list(left_out["GPU type"]) == [each["gpu"] for each in job.result["left_out"]] and len(left_out)
    pages.press(page, "Open as cluster")
    assert page.session_state["cluster"] == cluster_of_machines("H200", first["gpus"])
    assert pages.button(page, "Open as cluster").disabled
    later = pages.visit(pages.studio(session=page.session_state["token"]).run(), "what_if")
    assert pages.titles(later, "what-if-deployments") == pages.titles(page, "what-if-deployments")
    page.text_input(key="deployment-target").set_value("60 tokens/s a user").run()
    assert "have changed since this answer" in pages.said(page.info) and pages.titles(page, "what-if-deployments")
    pages.put(page, model=make_model(3, 8, 2))
    assert not pages.titles(page, "what-if-deployments") and not page.exception


def test_users_at_once_beyond_all_gpus_are_answered_with_the_limit_that_is_missed(page: AppTest) -> None:
    asked(page, "deployments", **LEFT, **{"deployment-most": 1, "deployment-target": "1000000 users at once"})
    pages.run_the_job(page, "Compare", "deployments")
    (warning,) = (each.value.replace("\\", "") for each in page.warning)
    assert (
        warning.startswith("No setup is predicted to meet the goal. ")
        and "H200: " in warning
        and "more GPUs than there are" in warning
    )


def test_the_model_alone_is_enough_and_without_one_it_is_asked_for(app: AppTest) -> None:
    pages.ask_capacity(pages.visit(app, "what_if"), "deployments")
    assert "Open a model" in pages.said(app.info)
    pages.put(app, model=small().model)
    assert not pages.button(app, "Compare").disabled and not app.error
    for question in ("size", "capacity"):
        pages.ask_capacity(app, question)
        assert "Open a workload and a cluster first" in pages.said(app.info)


@pytest.mark.parametrize(
    ("left", "complaint"),
    [
        (["GB200", 10.5, False, "B200", 8.6, False, "H100", 6.0, False, "H200", 3.0, False], "Tick at least one GPU type"),
        (["GB300", None, True], "GB300: type its price, or untick"),
        (["GB300", -3.0, True, "B200", "dear", True, "H200", float("nan"), 1], ""),  # stored by who knows whom
        (
            [each for gpu in list(every_gpu_type())[:13] for each in (gpu, 1.0, True)],
            "GPU types are ticked; compare at most 12",
        ),
    ],
    ids=["none", "no price", "nonsense", "too many"],
)
def test_prices_that_cannot_be_are_one_line(page: AppTest, left: list, complaint: str) -> None:
    asked(page, "deployments", **{"gpu-prices": left})
    assert pages.button(page, "Compare").disabled == bool(complaint) and not page.exception
    assert [complaint in error for error in pages.complaints(page)] == [True] * bool(complaint)


def test_goals_that_cannot_be_are_one_line(page: AppTest) -> None:
    asked(page, "deployments")
    for target, reason in (("soon", "'soon' is not understood"), ("5 ms at 0.5 users", "a whole number of users")):
        page.text_input(key="deployment-target").set_value(target).run()
        (complaint,) = pages.complaints(page)
        assert reason in complaint and not page.exception and pages.button(page, "Compare").disabled
    page.text_input(key="deployment-target").set_value("").run()
    assert not page.error and "the whole front" in pages.said(page.caption)


def test_list_prices_are_dollars_and_say_where_they_are_from(page: AppTest) -> None:
    asked(page, "deployments")
    assert not page.error and prices.SELLER in pages.said(page.caption) and prices.READ in pages.said(page.caption)
    page.text_input(key="size-currency").set_value("€").run()
    (complaint,) = pages.complaints(page)
    assert complaint == "Tick at least one GPU type to compare.", "no price in euros is known"
    assert prices.LIST_PRICES.keys() <= every_gpu_type().keys()


# More GPUs like the open ones.


def test_sizes_are_typed_tried_with_copies_and_open_with_their_plans(page: AppTest) -> None:
    problem = small()
    asked(page, "capacity", **{"what-if-system": "linear"})
    sizes = page.text_input(key="what-if-sizes-4-4")
    assert sizes.value == "4, 8, 12", "a ladder around the open cluster"
    for text, reason in (
        ("some", "'some' is no number of GPUs"),
        ("6", "no whole number of parts of 4; write 4"),
        ("4096", "1024"),
    ):
        sizes.set_value(text).run()
        (complaint,) = pages.complaints(page)
        assert reason in complaint and pages.button(page, "Find the number of GPUs").disabled
    sizes.set_value("4-8").run()
    job = pages.run_the_job(page, "Find the number of GPUs", "capacity")
    assert not page.error and page.dataframe[-1].value["GPUs"].tolist() == ["4", "8"]
    points, made = job.result["points"], job.result["candidates"]
    assert any(point["spare"] for point in points) and [row["gpus"] for row in made] == [4, 8]
    opens = next(button.label for button in page.button if button.label.startswith("Open the cluster of"))
    gpus = int(opens.split()[4])
    pages.press(page, opens)
    row = next(row for row in made if row["gpus"] == gpus)
    plan, point = Plan.from_dict(row["plan"], "test"), next(point for point in points if point["gpus"] == gpus)
    assert page.session_state["plan"] == plan.id and len(page.session_state["cluster"].gpus) == gpus
    recording = store.load_workload(page.session_state["workload"])
    on_it = make_problem(recording, page.session_state["cluster"], problem.model, problem.cost)
    assert simulate(plan, on_it).total == point["total"], "as the table says"


def test_what_grows_is_said_with_what_is_left_out(page: AppTest) -> None:
    cluster = cluster_presets()["hgx-h100-and-l40s"].cluster
    parts = list(parts_of(cluster).values())
    (one, kind), (other, left) = ((part, hardware(part)) for part in parts[:2])
    said = capacity.grows(cluster, one)
    assert (
        said.startswith(f"Every size is so many times a node of {kind}") and f"{left} of the open cluster are in none" in said
    )
    assert kind in capacity.grows(cluster, other).partition(";")[2]
    mix = capacity.grows(cluster, parts[-1])
    assert kind in mix and left in mix and "in none of them" not in mix
    page.session_state["cluster"] = cluster
    asked(page, "capacity")
    assert pages.field(page, "Grows by").options == list(parts_of(cluster))
    assert mix in pages.said(page.caption)
    pages.enter(page, "Grows by", next(iter(parts_of(cluster))))
    assert said in pages.said(page.caption)


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"what-if-sizes": "eight"}, "'eight' is no number of GPUs"),
        ({"what-if-sizes": "0"}, "0 is not between"),
        ({"what-if-sizes": "-8"}, "'-8' is no number of GPUs"),
        ({"what-if-sizes": "999999"}, "is not between"),
        ({"what-if-sizes": ""}, "'' is no number of GPUs"),
        ({"what-if-target": 0.0}, "0 is not between 0.001"),
        ({"what-if-target": -1.0}, "-1 is not between"),
        ({"what-if-target": 1e300}, "is not between"),
        ({"what-if-capacity-limit": 0.0}, "Time per plan"),
    ],
)
def test_sizes_and_targets_that_cannot_be_are_one_line(page: AppTest, choices: dict, complaint: str) -> None:
    asked(page, "capacity")
    (name, value), fields = next(iter(choices.items())), (*page.number_input, *page.text_input)
    next(field for field in fields if name in (field.key or "")).set_value(value)
    pages.run(page)
    (line,) = pages.complaints(page)
    assert complaint in line and pages.button(page, "Find the number of GPUs").disabled


def test_lengths_are_those_of_what_is_open(page: AppTest) -> None:
    def shown() -> tuple[int, int]:
        asked(page, "deployments")
        return tuple(int(pages.field(page, label).value) for label in ("Tokens in", "Tokens out"))

    usual = usual_serving()
    assert shown() == (usual.context, usual.output), "nothing says any"
    trace = store.load_workload(page.session_state["workload"])
    open_recording(page, replace(trace, name="decode_in512out100"), alone=True)
    pages.run(page)
    assert shown() == (512, 100), "by the recording's name"
    step = usual.model_copy(update={"context": 700, "output": 90})
    pages.put(page, serving=step, servings={page.session_state["model"].digest: step})
    assert shown() == (700, 90), "by the open step"


def test_earlier_searches_for_the_same_target_are_told_and_a_damaged_one_is_not(monkeypatch) -> None:
    """Only searches with other parts and for the open problem count."""
    problem, target = small(), 2.0
    about = problem_arguments(problem)

    def job(id: str, title: str, total: float, **more) -> SimpleNamespace:
        request = SimpleNamespace(kind="capacity", arguments=about | {"title": title, "target": target} | more)
        return SimpleNamespace(id=id, request=request, result=SimpleNamespace(points=[CapacityPoint(2, 8, total)]))

    past = [job("now", "4 × A", 1.0), job("other parts", "8 × B", 1.5), job("before that", "8 × B", 1.0)]
    past += [job("misses", "2 × C", 3.0), job("other target", "2 × D", 1.0, target=1.0)]
    past += [job("other model", "2 × E", 1.0, model=None), job("damaged", "2 × F", 1.0)]

    def result_of(job: SimpleNamespace) -> SimpleNamespace:
        if job.id == "damaged":
            raise InputError("it is damaged")
        return job.result

    monkeypatch.setattr(capacity.state, "study_jobs", list)
    monkeypatch.setattr(capacity.cached, "jobs", lambda _: past)
    monkeypatch.setattr(capacity.cached, "result_of", result_of)
    result = SimpleNamespace(title="4 × A", target=target)
    assert capacity._answers_of_other_parts(problem, result, {}) == ["Earlier search, 8 × B: 8 GPUs meet this target (1.5 s)."]
    nodes = problem.cluster.nodes
    monkeypatch.setattr(capacity, "parts_of", lambda _: {"8 × B": nodes[:1]})
    paid = capacity._answers_of_other_parts(problem, result, {gpu.type: 4.0 for gpu in nodes[0].gpus})
    assert paid == [f"Earlier search, 8 × B: 8 GPUs meet this target (1.5 s, cost {8 * len(nodes[0].gpus)} per hour)."]


def searched(*points: tuple) -> str:
    """The words on a search. points: GPUs, time or None, bound."""
    result = SimpleNamespace(title="1 × H100", system="aurora", cost_source="test", spare=False)

    def point(gpus: int, total: float | None, bound: float = 0.5) -> CapacityPoint:
        known = (total, bound, "placement and order") if total else (None, None, "", "no room")
        return CapacityPoint(gpus, gpus, *known)

    return capacity.honestly([point(*known) for known in points], 2.0, result, True)


def test_what_a_search_has_shown_is_said_and_no_more() -> None:
    text = searched((1, None), (2, 3.0, 2.5), (3, 1.0), (4, 2.5))
    assert text.startswith("Built from 1 × H100, planned by Aurora")
    assert "No smaller size can meet it" in text and "with 4 GPUs the target is missed again" in text
    text = searched((1, 3.0, 1.5), (2, 3.0), (3, 1.0), (4, 1.0))
    assert "No plan found for 1 or 2 GPUs meets it; a better plan might." in text
    assert "The larger sizes tried also meet it; beyond 4 GPUs nothing was tried." in text
    text = searched((1, 3.0, 2.5), (3, 1.0))
    assert "No smaller size tried can meet it" in text and "not tried: 2 GPUs" in text
    assert "larger sizes" not in text and "Beyond 3 GPUs nothing was tried." in text
    text = searched((1, 3.0))
    assert "Copies of experts, another model parallelism or other GPUs were not tried." in text and "No smaller" not in text


def test_bounds_of_two_scopes_have_names_of_their_own_and_the_file_has_the_table() -> None:
    """A size's own bound above the target rules out no other placement, and no column says so."""
    points = [
        CapacityPoint(1, 4, refused="=no room"),
        CapacityPoint(2, 8, 3.0123456789, 2.5, "order"),
        CapacityPoint(3, 12, 2.5, 2.2, "placement and order"),
        CapacityPoint(4, 16, 1.0, 1.0, "order"),
    ]
    part = cluster_presets()["hgx-h100-and-l40s"].cluster.nodes[:1]
    part = (part[0].model_copy(update={"gpus": part[0].gpus[:4]}),)
    table = capacity.as_text(points, part, 2.0)
    bounds = "Bound for this placement, s", "Bound for any placement, s"
    assert list(table.columns) == ["GPUs", "Cluster", "Time, s", *bounds, "Result"]
    assert table["Cluster"].tolist() == [f"{4 * count} × {part[0].gpus[0].type}" for count in (1, 2, 3, 4)]
    assert table["Bound for this placement, s"].tolist() == ["—", "2.5", "—", "1"]
    assert table["Bound for any placement, s"].tolist() == ["—", "—", "2.2", "—"]
    assert "might" in table["Result"][1] and table["Result"][2].startswith("cannot")
    assert "Bound for any placement, s" not in capacity.as_text(points[:2], part, 2.0).columns
    unknown = [CapacityPoint(1, 4, 3.0, None, "order")]
    assert not any(name.startswith("Bound") for name in capacity.as_text(unknown, part, 2.0)), "of measured exchanges"

    result = SimpleNamespace(title="=4 × H100", system="aurora", target=2.0)
    lines = as_csv(capacity.to_download(points, result, {"H100": 2.5}, 10.0)).splitlines()
    assert lines[0] == (
        'Built from,System,GPUs,"Target, ms","Time, ms","Bound for this placement, ms","Bound for any placement, ms",'
        "Price per H100-hour,Cost per hour,Result,Spare slots,Why it is slower"
    )
    assert lines[1].startswith("'=4 × H100,") and "'=no room" in lines[1]
    assert ",8,2000.0,3012.35,2500.0,,2.5,20.0," in lines[2]
    assert "Cost" not in as_csv(capacity.to_download(points, result, {"H100": None}, None))


# Machines for the recording.


def priced(page: AppTest, *offers: str | float | None, target: str = "50 s a pass") -> AppTest:
    """The card with names, prices and numbers of node types, as they are kept, and a target."""
    return asked(page, "size", **{"size-offers": list(offers), "size-target": target, "size-front": 2})


def test_the_cheapest_clusters_open_with_their_plans(page: AppTest) -> None:
    problem = small()
    priced(page, "node", 1.0, 2, "aurora-40g", 1.5, 3)
    assert "Nothing run yet" in pages.said(page.info) and "The target is of a pass through" in pages.said(page.caption)
    job = pages.run_the_job(page, "Find the cheapest clusters", "size")
    assert not page.error
    first, second = job.result["candidates"]
    assert first["point"]["price"] == 1.0 and second["point"]["nodes"] == {"aurora-40g": 1}
    assert second["point"]["objective"] <= 0.8 * first["point"]["objective"]
    (title,) = pages.titles(page, "what-if-sizing")
    assert title == f"1 × node, $1.00 an hour: {seconds(first['point']['objective'])}, the cheapest found"
    assert "Proven: no cheaper cluster of this catalogue" in pages.said(page.markdown)
    assert page.expander[-1].label == "1 proof leaves out clusters" and page.dataframe[-1].value.iloc[0, 0] == "2 × node"
    pages.press(page, "Open cluster, plan and recording")
    plan = Plan.from_dict(first["plan"], "test")
    dealt = store.load_workload(page.session_state["workload"])
    on_it = make_problem(dealt, page.session_state["cluster"], problem.model, problem.cost)
    assert page.session_state["plan"] == plan.id and problem.workload.digest in page.session_state["workloads"]
    assert simulate(plan, on_it).total == first["point"]["objective"]
    assert "opened 1 × node, its plan, and small with" in page.toast[0].value
    assert page.session_state["workloads"][dealt.digest] == "small, dealt to 1 × node"
    for tab in (page, pages.visit(pages.studio(session=page.session_state["token"]).run(), "what_if")):
        assert pages.titles(tab, "what-if-sizing") == [title] and pages.button(tab, "Open cluster, plan and recording").disabled
        assert any(name.startswith("Sized: 1 × node") for name in pages.offered_plans(tab))
    pages.put(page, model=make_model(3, 8, 2))
    assert not pages.titles(page, "what-if-sizing") and not page.exception


def test_questions_of_sizing_that_cannot_be_are_one_line(page: AppTest) -> None:
    priced(page, "node", "dear", 8, "aurora-40g", 1.0, 2.5, target="soon")  # stored by who knows whom
    assert pages.button(page, "Find the cheapest clusters").disabled
    for target, reason in (
        ("soon", "'soon' is not understood; write such as '50 ms a token'"),
        ("first token in 2 s", "open it by its Hugging Face config.json"),
    ):
        page.text_input(key="size-target").set_value(target).run()
        (complaint,) = pages.complaints(page)
        assert reason in complaint and not page.exception
    own = {"node": (small().cluster.nodes[0], 1e-4)}
    for offers, reason in (
        ({"node": (None, 1)}, "node: type its price, or those of its GPUs"),
        (dict.fromkeys(list(node_types())[:13], (1.0, 1)), "13 machines can be had; at most 12"),
    ):
        with pytest.raises(InputError, match=reason):
            sizing._catalogue(offers, own, "$")
    assert sizing._catalogue({"node": (None, None)}, own, "$") is None


def test_clusters_are_sized_for_the_slowest_of_the_recordings_and_for_the_open_step(page: AppTest) -> None:
    problem = small()
    other = ExpertLoad("other", problem.workload.load[:, ::-1].copy(), problem.model.moe_layers)
    open_recording(page, other, alone=False)
    pages.put(page, workload=problem.workload.digest, others=[other.digest])
    priced(page, "node", 1.0, 2, target="50 s a token at 64 users")
    assert page.multiselect(key="size-recordings").value == [problem.workload.digest, other.digest]
    assert "a token of 64 sequences" in pages.said(page.caption) and "MoE layers alone" in pages.said(page.caption)
    page.multiselect(key="size-recordings").set_value([]).run()
    assert pages.complaints(page) == ["Choose at least one recording."]
