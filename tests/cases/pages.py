"""The pages of the studio, driven without a browser: visit a page, press its buttons, read its text."""

import contextlib
from collections.abc import Iterator

from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.runtime.forward_msg_queue import ForwardMsgQueue
from streamlit.testing.v1 import AppTest

from engine import store
from engine.jobs import runner
from tests.cases.cli import ROOT

MAIN = str(ROOT / "app" / "main.py")
PAGES = ("workload", "cluster", "affinity", "optimise", "timeline", "what_if", "review", "launch")


def studio(**query: str) -> AppTest:
    """The studio at an address, not run yet. query: the parameters of the address."""
    app = AppTest.from_file(MAIN, default_timeout=120)
    for name, value in query.items():
        app.query_params[name] = value
    return app


def run(app: AppTest) -> AppTest:
    """Run the page; no exception may reach the visitor."""
    app.run()
    assert not app.exception, app.exception
    return app


def put(app: AppTest, **values) -> AppTest:
    """Put values into the session and run the page."""
    for name, value in values.items():
        app.session_state[name] = value
    return run(app)


def visit(app: AppTest, page: str) -> AppTest:
    """Go to a page and run it."""
    return run(app.switch_page(f"../pages/{page}.py"))


@contextlib.contextmanager
def messages() -> Iterator[list[ForwardMsg]]:
    """Everything that pages tell browsers inside, as it comes."""
    told: list[ForwardMsg] = []
    ForwardMsgQueue.on_before_enqueue_msg(told.append)
    try:
        yield told
    finally:
        ForwardMsgQueue.on_before_enqueue_msg(None)


def button(app: AppTest, label: str):
    return next(button for button in app.button if button.label == label)


def buttons(app: AppTest) -> dict:
    return {button.label: button for button in app.button}


def press(app: AppTest, label: str) -> AppTest:
    button(app, label).click()
    return run(app)


def field(app: AppTest, label: str):
    """The input or choice with a label."""
    widgets = (*app.number_input, *app.selectbox, *app.checkbox, *app.multiselect, *app.segmented_control)
    return next(widget for widget in widgets if widget.label == label)


def enter(app: AppTest, label: str, value) -> AppTest:
    """Set the input or choice with a label."""
    field(app, label).set_value(value)
    return run(app)


def chooser(app: AppTest, label: str):
    return next(box for box in app.selectbox if box.label == label)


def pick(app: AppTest, key: str, value: str) -> AppTest:
    """Set the segmented control with a key that begins so."""
    next(group for group in app.get("button_group") if (group.key or "").startswith(key)).set_value(value)
    return run(app)


def ask_capacity(app: AppTest, question: str) -> AppTest:
    """Go to the What-if page's capacity, and to one of its questions."""
    return pick(pick(app, "what-if-half", "capacity"), "what-if-question", question)


def tick(app: AppTest, *systems: str) -> AppTest:
    """Select these systems, by the begin of their titles, and no others."""
    for box in app.checkbox:
        if box.label.startswith("**"):
            box.set_value(box.label.startswith(tuple(f"**{system}" for system in systems)))
    return run(app)


def upload(app: AppTest, key: str, files: dict[str, str | bytes]) -> AppTest:
    """Put files into the uploader with a key, in place of those in it. files: contents by name."""
    contents = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
    zone = app.file_uploader(key=key)
    zone.set_value([(name, content, "application/octet-stream") for name, content in contents.items()])
    return run(app)


def said(elements) -> str:
    """The text of elements, without the backslashes that keep it from being read as markup."""
    return " | ".join(element.value.replace("\\", "") for element in elements)


def complaints(app: AppTest) -> list[str]:
    return [error.value.replace("\\", "") for error in app.error]


def answers(app: AppTest) -> list[str]:
    """The answers to uploaded files, which stand in one line."""
    mark = ":material/check: "
    lines = [caption.value for caption in app.caption if caption.value.startswith(mark)]
    assert len(lines) <= 1
    return [answer for line in lines for answer in line.removeprefix(mark).replace("\\", "").split(" · ")]


def metrics(app: AppTest) -> dict[str, str]:
    """Values of the metrics on the page by label."""
    return {metric.label.replace("\\", ""): metric.value for metric in app.metric}


def titles(app: AppTest, of: str = "") -> list[str]:
    """Titles of the charts on the page, which are their descriptions too. of: only charts with a key that begins so."""
    return [chart.proto.alt for chart in app.get("plotly_chart") if not of or f"-{of}" in chart.proto.id]


def offered_plans(app: AppTest) -> list[str]:
    """The plans that the chooser of the open plan offers."""
    return [label for box in app.selectbox if box.key == "choose-plan" for label in box.options]


def gain(app: AppTest) -> dict[str, str]:
    """The large figure of the verdict line by its name; a page has at most one such line."""
    names = [caption.value.replace("\\", "") for caption in app.caption]
    names = [name for name in names if name.startswith("Gain over") or name == "Deployed now"]
    large = [text.value.removeprefix("###### ") for text in app.markdown if text.value.startswith("###### ")]
    return dict(zip(names, large, strict=True))


def open_sample(app: AppTest) -> AppTest:
    """Open the sample by its button, on a page that has been run."""
    return press(app, "Open the sample")


def finished(kind: str) -> runner.Job:
    """The newest job of a kind, waited for."""
    job = runner.jobs(store.data_folder(), kind)[0]
    assert runner.wait(job, 90) is runner.State.DONE, job.log_tail()
    return job


def run_the_job(app: AppTest, label: str = "Plan it", kind: str = "optimise") -> runner.Job:
    """Press the button that starts a job, wait for the job and run the page again."""
    press(app, label)
    job = finished(kind)
    run(app)
    return job


def plan_the_sample(app: AppTest) -> AppTest:
    """Plan with the default systems, in a job, and draw the Optimise page again."""
    run_the_job(visit(app, "optimise"))
    return app
