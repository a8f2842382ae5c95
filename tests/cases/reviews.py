"""Plans saved, opened by links and discussed on the Review page."""

from streamlit.testing.v1 import AppTest

from engine.store import team
from engine.store.database import database
from tests.cases.pages import press, studio, visit


def fill(app: AppTest, label: str, text: str) -> AppTest:
    """Type into the field with a label, without running the page."""
    next(widget for widget in (*app.text_input, *app.text_area) if widget.label == label).set_value(text)
    return app


def save(app: AppTest, name: str | None = None, note: str = "", question: str | None = None) -> team.SavedPlan:
    for label, text in (("Name of the plan", name), ("Note", note), ("Question to the team", question)):
        if text is not None:
            fill(app, label, text)
    press(app, "Save")
    return team.find_saved(database(), app.session_state["reviewed"][0])


def link(**query: str) -> AppTest:
    """The Review page in a new session that opens a link."""
    return visit(studio(**query), "review")


def table(app: AppTest):
    """The list of saved plans."""
    return app.dataframe[0].value


def review_of(saved: team.SavedPlan) -> team.Review:
    """The newest review of a saved plan."""
    return team.reviews_of(database(), saved.number)[0]
