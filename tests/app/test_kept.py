"""What a person chooses on a page is there again: after a while, and in a new tab at the same address."""

from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import state
from app.optimise import goal
from app.state.stored import MOST_CHOICES, read
from engine import store
from tests.app.conftest import TOKEN
from tests.app.test_pages import visit
from tests.app.test_state import at

CHOICES: dict[str, dict[str, Any]] = {
    "optimise": {
        f"use-{goal.ONE}-eplb": True,
        f"option-{goal.ONE}-aurora-time_limit": 7.0,
        f"use-{goal.ONE}-rcs": False,
    },
    "timeline": {"timeline-beside": [], "timeline-layers": (2, 3)},
    "what_if": {"what-if-compute": 2, "what-if-dtype": "fp8", "what-if-noise": 20, "what-if-study": "capacity"},
    "affinity": {"affinity-values": "Counts", "affinity-order": "Grouped by GPU"},
    "launch": {"launch-place": "testbed", "launch-repeats": 7, "launch-limit": 120, "launch-dtype": "bf16"},
    "workload": {"workload-view": "Table"},
    "cluster": {"overlay": True},
}
KINDS = ("checkbox", "toggle", "selectbox", "multiselect", "number_input", "slider", "select_slider", "button_group")


def widget(app: AppTest, key: str):
    return next(widget for kind in KINDS for widget in app.get(kind) if widget.key == key)


@pytest.mark.parametrize("page", CHOICES)
def test_what_is_chosen_is_found_on_coming_back_and_in_a_new_tab(ana: AppTest, page: str) -> None:
    visit(ana.run(), page)
    for key, value in CHOICES[page].items():
        assert widget(ana, key).value != value, "another one than the default"
        widget(ana, key).set_value(value)
        ana.run()
        assert not ana.exception, ana.exception
    visit(ana, "review")
    visit(ana, page)
    assert {key: widget(ana, key).value for key in CHOICES[page]} == CHOICES[page]
    tab = visit(at({"session": ana.query_params["session"]}), page)
    assert {key: widget(tab, key).value for key in CHOICES[page]} == CHOICES[page]


def test_a_look_at_the_pages_chooses_nothing(ana: AppTest) -> None:
    ana.run()
    kept = store.session_written(ana.query_params["session"])
    for page in CHOICES:
        visit(ana, page)
    assert ana.session_state["choices"] == {}
    assert store.session_written(ana.query_params["session"]) == kept


def test_back_to_how_things_are_is_kept_as_well(ana: AppTest) -> None:
    visit(ana.run(), "what_if")
    widget(ana, "what-if-compute").set_value(2).run()
    next(button for button in ana.button if button.label == "Reset all sliders").click().run()
    assert widget(ana, "what-if-compute-1").value == 1 and "what-if-compute" not in ana.session_state["choices"]


@pytest.mark.usefixtures("empty_session")
def test_the_oldest_choices_give_way() -> None:
    for number in range(MOST_CHOICES + 3):
        state.keep_choice(f"key-{number}", number)
    state.keep_choice("key-5", "anew")
    choices = read(store.load_session(TOKEN))[0].choices
    assert len(choices) == MOST_CHOICES
    assert next(iter(choices)) == "key-3" and list(choices)[-1] == "key-5" and choices["key-5"] == "anew"
