"""Asks a studio that has the toy system: run by `test_toy_system` in a copy of the studio, prints one JSON object."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from engine import store
from engine.cli import main
from engine.jobs import runner

INPUTS = [
    *("--workload", "sample_traces/tiny-moe/alpha-code.npz"),
    *("--cluster", "sample_traces/mixed-8.json"),
    *("--model", "sample_traces/tiny-moe-alpha.json"),
]


def command(*arguments: str) -> str:
    """The output of a command that must succeed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            code = main([*arguments])
    except SystemExit as end:  # --help
        code = end.code
    assert code == 0, arguments
    return printed.getvalue()


def command_line() -> dict[str, Any]:
    """Its help, a plan of its own, its place among all systems, and a comparison."""
    return {
        "help": command("plan", "--help"),
        "toy": json.loads(command("plan", *INPUTS, "--system", "toy", "--set", "slots=uneven", "-o", "toy.json", "--json")),
        "linear": json.loads(command("plan", *INPUTS, "--system", "linear", "-o", "linear.json", "--json")),
        "all": json.loads(command("plan", *INPUTS, "--system", "all", "--set", "time_limit=0.1", "--json")),
        "compare": json.loads(command("compare", "linear.json", "toy.json", "--json")),
    }


def optimise_page() -> dict[str, Any]:
    """Its box and its options on Optimise, and the table of candidate plans after it and the linear placement have run."""
    app = AppTest.from_file(Path("app/main.py").resolve(), default_timeout=120).run()
    next(button for button in app.button if button.label == "Open the sample").click()
    app.run()
    app.switch_page("../pages/optimise.py").run()
    before = {box.label: box.value for box in app.checkbox}
    for box in app.checkbox:
        box.set_value(box.label.startswith(("**Toy**", "**Linear placement**")))
    app.run()
    options = [box.key for box in app.selectbox if "-toy-" in (box.key or "")]
    next(button for button in app.button if button.label == "Plan it").click()
    app.run()
    job = runner.jobs(store.data_folder(), "optimise")[0]
    assert runner.wait(job, 120) is runner.State.DONE, job.log_tail()
    app.run()
    assert not app.exception, app.exception
    table = app.dataframe[0].value
    against = next(column for column in table if column.startswith("Against"))
    return {"boxes": before, "options": options, "plans": dict(zip(table["Plan"], table[against], strict=True))}


if __name__ == "__main__":
    print(json.dumps({"command line": command_line(), "page": optimise_page()}))
