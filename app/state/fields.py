"""Fields of a browser tab, as attributes: `session` is kept with the session, `visit` ends with the tab.

Every field is in `st.session_state` under its own name.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast, overload

import streamlit as st
from streamlit.errors import StreamlitWidgetAlreadyInstantiatedError

from app.state.stored import Session
from engine.store.team_approval import Place

TYPED = "typed-"
"""Prefix of the keys of text fields that `Visit.keep_typed` keeps."""

T = TypeVar("T")


class _Session:
    """Reads the fields of `Session` that the tab has. `change` and `update` of `app.state.address` write them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(st.session_state, name)


class _Field(Generic[T]):
    """A field of `Visit`. default: its value until one is set, or a function that makes a dict to be changed in place."""

    def __init__(self, default: T | Callable[[], T]) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, visit: None, owner: type) -> "_Field[T]": ...
    @overload
    def __get__(self, visit: "Visit", owner: type) -> T: ...
    def __get__(self, visit: "Visit | None", owner: type) -> "T | _Field[T]":
        if visit is None:
            return self
        if callable(self.default):
            return st.session_state.setdefault(self.name, self.default())
        return st.session_state.get(self.name, self.default)

    def __set__(self, visit: "Visit", value: T) -> None:
        st.session_state[self.name] = value


@dataclass(frozen=True)
class ReviewVisit:
    """A person has a review before them. Moments are in seconds since the epoch."""

    who: str
    review: str
    before: float
    """The newest entry that they had seen when they came."""
    opened: float
    """The newest entry that there was when they came."""
    shown: float
    """The newest entry drawn since."""
    since: float
    """When they came."""
    noted: bool
    """True if it is stored that they saw the entries that there were when they came."""


class Visit:
    """Fields that end with the browser tab."""

    token = _Field[str | None](None)
    """Token of the open session; None: no session was restored yet."""
    seen = _Field[tuple[int, int] | None](None)
    """`store.session_written` when this tab last read or wrote the session."""
    tried = _Field[set[str]](set)
    """Texts of the session that this tab tried to store."""
    overtaken = _Field[bool](False)
    """True if another tab has stored a later session than this one has; this one is stored no more."""
    drawn_overtaken = _Field[bool | None](None)
    """`overtaken` when the page was drawn; None: no page was drawn yet."""
    not_stored = _Field[str | None](None)
    """Why the session could not be stored when it was last changed."""
    left_out = _Field[str | None](None)
    """Sentence about the parts of the stored session that could not be opened, until it is shown."""
    sessions_shown = _Field[int](0)
    """Sessions that this tab has shown before the open one; edits to undo belong to one session."""
    link = _Field[tuple[str, str, str] | None](None)
    """Plan, review and place that this tab wrote to the address."""

    gone = _Field[bool](False)
    """True if the person with this session has logged out: its address is not for the next person."""
    back = _Field[bool](False)
    """True if the browser is back at the page it asked for before a login."""
    recalled_person = _Field[str | None](None)
    """Name that a person once typed in this browser."""
    recalled_sessions = _Field[tuple[str, ...]](())
    """Tokens of the last sessions of this browser, the newest first."""
    brings_own = _Field[bool](False)
    """True if a newcomer has said that they bring a recording."""

    notice = _Field[str | None](None)
    """Sentence to show after the next rerun."""
    run = _Field[bool | None](None)
    """True if Optimise is to run the ticked systems as soon as it is drawn."""
    uploads = _Field[dict[str, tuple[str, bool] | None]](dict)
    """Answer to every uploaded file that was read, by file id, and True if it was refused; see `app.uploads`."""
    records = _Field[bool](False)
    """True if the form of a recording from a person's own model is open."""
    own_texts = _Field[tuple[str, Any] | None](None)
    """The texts for a person's own model, with the model's folder, and their tokens or why there are none; see
    `app.own_model`."""
    zones = _Field[dict[str, list[str]]](dict)
    """Ids of the files in every drop zone."""
    told = _Field[dict[str, list[str]]](dict)
    """Ids of the files in every drop zone with answers that are shown."""
    watched = _Field[dict[str, bool]](dict)
    results_seen = _Field[dict[str, int | None]](dict)
    widget_turns = _Field[dict[str, int]](dict)

    wants_two = _Field[bool](False)
    """True if a person is about to choose a second model."""
    advised_spare = _Field[tuple[int, int] | None](None)
    """Spare slots a GPU that a person took from the advisor, and how many times one did; None: the usual number."""
    edit_round = _Field[int](0)
    """Counts the clusters opened from outside the cluster table; part of the table's key."""
    table_base = _Field[tuple | None](None)
    """Start of the cluster table's edits, see `app.cluster.table`."""
    offers_base = _Field[Any](None)
    """Start of the edits in the table of node types with prices, see `app.what_if.sizing`."""
    prices_base = _Field[Any](None)
    """Circumstances and start of the edits in the table of GPU types with prices, see `app.what_if.prices`."""
    drawn = _Field[tuple[int, str | None]]((0, None))
    """Number of the last edit on the drawing board that was dealt with, and why it was refused, if it was."""
    layers_compared = _Field[tuple[tuple[int, int], tuple[int, int]]](((0, 1), (0, 1)))
    """Layers at which the Affinity page's slider began, and those that it shows."""

    launch_shown = _Field[str | None](None)
    """Id of the launch with the report that a person chose to see; None: the newest of this session."""
    run_folders = _Field[dict[str, str]](dict)
    """Run folders written for launches on clusters, by digest of the launch and its destination."""

    reviewed = _Field[tuple[int, str | None] | None](None)
    """Number of the saved plan on the Review page and the id of its review; None: the list alone."""
    review_visit = _Field[ReviewVisit | None](None)
    pointed = _Field[tuple[Place | None, int]]((None, 0))
    """Place that the comment followed last points to, and how many were followed."""
    return_to_discussion = _Field[bool | None](None)
    """True if Review is to show the discussion from which a comment led away."""
    refused = _Field[tuple[str, str] | None](None)
    """Form that could not be written, and why, until the form shows it."""
    written = _Field[int](0)
    """Writes of this tab to the team's database; part of the keys of forms that begin anew after one."""

    def set(self, **fields: Any) -> None:
        """Assign fields, for the callback of a widget."""
        for name, value in fields.items():
            setattr(self, name, value)

    def take(self, field: Literal["notice", "left_out", "run", "return_to_discussion"]) -> Any:
        """Return a field, None if it was not set, and forget it."""
        return st.session_state.pop(field, None)

    def take_refusal(self, place: str) -> str | None:
        """Return why the form `place` could not be written, and forget it; None if it could."""
        if self.refused is None or self.refused[0] != place:
            return None
        return st.session_state.pop("refused")[1]

    def widget_key(self, key: str) -> str:
        """Return the key of the widget that shows the choice kept under a key."""
        turn = self.widget_turns.get(key, 0)
        return f"{key}-{turn}" if turn else key

    def draw_anew(self, keys: Iterable[str]) -> None:
        """Have widgets show the choices kept under these keys, or their defaults.

        They get other keys, since a browser keeps showing the last value of a widget with the same key.
        """
        for key in keys:
            st.session_state.pop(self.widget_key(key), None)
            self.widget_turns[key] = self.widget_turns.get(key, 0) + 1

    def newly_finished(self, job: str, finished: bool) -> bool:
        """True once for a job that was seen running before and has finished now."""
        before, self.watched[job] = self.watched.get(job), finished
        return before is False and finished

    def newly_written(self, job: str, written: int | None) -> bool:
        """True whenever a job has kept a better result since the last call. written: time of its newest result."""
        before, self.results_seen[job] = self.results_seen.get(job, written), written
        return written != before

    def look_at(self, number: int | None, review: str | None = None) -> None:
        """Show a saved plan and its review on the Review page; None: the list alone."""
        self.reviewed = None if number is None else (number, review)
        self.pointed = (None, self.pointed[1])

    def point_at(self, place: Place) -> None:
        """Show the place that a comment points to."""
        self.pointed = (place, self.pointed[1] + 1)

    def first_layers(self, last: int) -> tuple[int, int]:
        """MoE layers that a timeline begins with: those that a comment points to, else the first two. last: the last layer."""
        place, _ = self.pointed
        first = place.number if place is not None and place.kind == "layer" and place.number <= last else 0
        return first, min(first + 1, last)

    def visit_to(self, who: str, review: str) -> ReviewVisit | None:
        """The visit that a person pays to a review; None: they have just come to it."""
        known = self.review_visit
        return known if known is not None and (known.who, known.review) == (who, review) else None

    def keep_typed(self) -> None:
        """Keep the typed text of fields on a run that cannot draw them all: Streamlit forgets fields that are not drawn.

        They hold the text that could not be written, so the refusal is not shown again.
        """
        self.refused = None
        for key in [key for key in st.session_state if str(key).startswith(TYPED)]:
            with suppress(StreamlitWidgetAlreadyInstantiatedError):  # then it is drawn
                st.session_state[key] = st.session_state[key]

    def end_if_left(self) -> None:
        """End the run here if its page was left meanwhile: Streamlit does so when a run reads its session."""
        self.notice  # noqa: B018


session = cast(Session, _Session())
visit = Visit()
