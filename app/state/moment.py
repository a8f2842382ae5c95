"""What is only of the moment: it ends with the browser tab and is not kept."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import streamlit as st
from streamlit.errors import StreamlitWidgetAlreadyInstantiatedError

from engine.store.team_approval import Place

_WANTS_TWO, _EDIT_ROUND, _TABLE_BASE, _DRAWN = "wants_two", "edit_round", "table_base", "drawn"
_SESSIONS = "sessions_shown"
_UPLOADS, _ZONES, _TOLD, _WATCHED, _LAYERS = "uploads", "zones", "told", "watched", "layers_compared"
_SHOWN, _RUN_FOLDERS, _RESULTS = "launch_shown", "run_folders", "results_seen"
_REVIEWED, _REFUSED, _WRITTEN, _POINTED = "reviewed", "refused", "written", "pointed"
_VISIT, _TURNS, _RECALLED = "visit", "widget_turns", "recalled_person"
_ADVISED_SPARE, _BRINGS_OWN = "advised_spare", "brings_own"
_NOTICE, _LEFT_OUT, _BACK, _GONE = "notice", "left_out", "back", "gone"
_OVERTAKEN, _NOT_STORED, _RUN = "overtaken", "not_stored", "run"
_RETURN = "return_to_discussion"
TYPED = "typed-"
"""How the keys of text fields begin whose text `keep_typed` keeps."""


def recalled_person() -> str | None:
    """The name that a person once typed in this browser."""
    return st.session_state.get(_RECALLED)


def recall_person(name: str) -> None:
    st.session_state[_RECALLED] = name


def widget_key(key: str) -> str:
    """The key of the widget that shows what is kept under a key."""
    turn = st.session_state.get(_TURNS, {}).get(key, 0)
    return f"{key}-{turn}" if turn else key


def draw_anew(keys: Iterable[str]) -> None:
    """Have widgets show what is kept under these keys, or their defaults. A browser shows in a widget of the same key what it
    last showed there, so that they get others."""
    turns = st.session_state.setdefault(_TURNS, {})
    for key in keys:
        st.session_state.pop(widget_key(key), None)
        turns[key] = turns.get(key, 0) + 1


def brings_own() -> bool:
    """Whether a newcomer has said that they bring a recording."""
    return st.session_state.get(_BRINGS_OWN, False)


def bring_own() -> None:
    st.session_state[_BRINGS_OWN] = True


def wants_two() -> bool:
    """Whether a person is about to choose a second model."""
    return st.session_state.get(_WANTS_TWO, False)


def want_two(wanted: bool) -> None:
    st.session_state[_WANTS_TWO] = wanted


def edit_round() -> int:
    """Changes whenever a cluster is opened from outside the table: the table's key."""
    return st.session_state.get(_EDIT_ROUND, 0)


def begin_table() -> None:
    """Let the cluster table begin anew, with the cluster that is opened now."""
    st.session_state[_EDIT_ROUND] = edit_round() + 1


def show_another_session() -> None:
    """The browser shows another session's from now on: what it remembers of this one, such as edits to undo, is over."""
    st.session_state[_SESSIONS] = sessions_shown() + 1


def sessions_shown() -> int:
    """How many sessions this browser tab has shown before the one that is open."""
    return st.session_state.get(_SESSIONS, 0)


def table_base() -> tuple | None:
    """What the cluster table started from, see `app.cluster.table`."""
    return st.session_state.get(_TABLE_BASE)


def keep_table_base(base: tuple) -> None:
    st.session_state[_TABLE_BASE] = base


def drawn() -> tuple[int, str | None]:
    """The number of the last edit on the drawing board that was dealt with, and why it could not be taken, if so."""
    return st.session_state.get(_DRAWN, (0, None))


def answer_drawing(serial: int, complaint: str | None) -> None:
    """An edit on the drawing board was taken, or refused with a reason."""
    st.session_state[_DRAWN] = (serial, complaint)


def layers_compared() -> tuple[tuple[int, int], tuple[int, int]]:
    """The layers at which the Affinity page's slider began, and those that it shows."""
    return st.session_state.get(_LAYERS, ((0, 1), (0, 1)))


def compare_layers(start: tuple[int, int], shown: tuple[int, int]) -> None:
    st.session_state[_LAYERS] = start, shown


def first_time(file_id: str) -> bool:
    """True once per uploaded file: an upload stays in its widget, but is read only once."""
    seen = st.session_state.setdefault(_UPLOADS, {})
    if file_id in seen:
        return False
    seen[file_id] = None
    return True


def newly_in(zone: str, file_ids: list[str]) -> list[str]:
    """Which of the files in a drop zone were not there before. Where one has left, what was said against those that stay is
    forgotten: it may have been that file's fault."""
    zones, seen = st.session_state.setdefault(_ZONES, {}), st.session_state.setdefault(_UPLOADS, {})
    if set(zones.get(zone, ())) - set(file_ids):
        refused = {id for id in file_ids if seen.get(id) and seen[id][1]}
        for key in [key for key in seen if key.partition(" ")[0] in refused]:
            del seen[key]
    came, zones[zone] = [id for id in file_ids if id not in zones.get(zone, ())], file_ids
    return came


def tell_of(zone: str, file_ids: list[str], alone: bool) -> None:
    """Say what became of these files in a drop zone. alone: and no longer of those before them, which were another upload."""
    told = st.session_state.setdefault(_TOLD, {})
    told[zone] = list(dict.fromkeys([*([] if alone else told.get(zone, [])), *file_ids]))


def told_of(zone: str, file_ids: list[str]) -> list[str]:
    """The files among these, all that are in a drop zone, of which it is said what became of them."""
    return [id for id in st.session_state.get(_TOLD, {}).get(zone, []) if id in file_ids]


def complain(file_id: str, text: str) -> None:
    """Remember why an uploaded file could not be used, for as long as it is in its widget."""
    st.session_state[_UPLOADS][file_id] = (text, True)


def answer_upload(file_id: str, text: str) -> None:
    """Remember what an uploaded file was opened as, for as long as it is in its widget."""
    st.session_state[_UPLOADS][file_id] = (text, False)


def complaints(file_ids: Sequence[str]) -> list[str]:
    """The complaints about these files, about those of one recording once."""
    return list(dict.fromkeys(text for text, refused in _said(file_ids) if refused))


def answers_of_uploads(file_ids: Sequence[str]) -> list[str]:
    """What these files were opened as, files of one recording once."""
    return list(dict.fromkeys(text for text, refused in _said(file_ids) if not refused))


def _said(file_ids: Sequence[str]) -> list[tuple[str, bool]]:
    seen = st.session_state.get(_UPLOADS, {})
    return [seen[id] for id in file_ids if seen.get(id)]


def newly_finished(job: str, finished: bool) -> bool:
    """True once for a job that was seen running before and has finished now."""
    watched = st.session_state.setdefault(_WATCHED, {})
    before, watched[job] = watched.get(job), finished
    return before is False and finished


def newly_written(job: str, written: int | None) -> bool:
    """True whenever a job has kept a better result than when it was looked at last. written: when it kept its newest."""
    seen = st.session_state.setdefault(_RESULTS, {})
    before = seen.get(job, written)
    seen[job] = written
    return written != before


def launch_shown() -> str | None:
    """Id of the launch whose report a person chose to see; None: the newest of this session."""
    return st.session_state.get(_SHOWN)


def show_launch(id: str | None) -> None:
    st.session_state[_SHOWN] = id


def run_folder(key: str) -> str | None:
    """The run folder that was written for a launch on a cluster; key: digest of the launch and its destination."""
    return st.session_state.get(_RUN_FOLDERS, {}).get(key)


def keep_run_folder(key: str, folder: str) -> None:
    st.session_state.setdefault(_RUN_FOLDERS, {})[key] = folder


def advised_spare() -> tuple[int, int] | None:
    """Spare slots a GPU that a person took from the advisor, and how many times one did; None: the usual number."""
    return st.session_state.get(_ADVISED_SPARE)


def advise_spare(slots: int) -> None:
    st.session_state[_ADVISED_SPARE] = slots, (advised_spare() or (0, 0))[1] + 1


def reviewed() -> tuple[int, str | None] | None:
    """The number of the saved plan that is looked at and the id of its review; None: the list alone."""
    return st.session_state.get(_REVIEWED)


def look_at(number: int | None, review: str | None = None) -> None:
    st.session_state[_REVIEWED] = None if number is None else (number, review)
    st.session_state[_POINTED] = (None, _turn())


@dataclass(frozen=True)
class Visit:
    """A person has a review before them. Moments in seconds since the epoch. before: up to when they had seen it; opened: its
    newest entry when they came; shown: the newest that was drawn since; since: when they came; noted: whether it is kept that
    they saw what was there when they came."""

    who: str
    review: str
    before: float
    opened: float
    shown: float
    since: float
    noted: bool


def visit(who: str, review: str) -> Visit | None:
    """The visit that a person pays to a review; None: they have just come to it."""
    known = st.session_state.get(_VISIT)
    return known if known is not None and (known.who, known.review) == (who, review) else None


def keep_visit(visit: Visit) -> None:
    st.session_state[_VISIT] = visit


def pointed() -> tuple[Place, int] | None:
    """What the comment that was followed last points to, and the how manieth that was; None: nothing."""
    place, turn = st.session_state.get(_POINTED, (None, 0))
    return None if place is None else (place, turn)


def point_at(place: Place) -> None:
    """Show what a comment points to."""
    st.session_state[_POINTED] = (place, _turn() + 1)


def _turn() -> int:
    return st.session_state.get(_POINTED, (None, 0))[1]


def return_to_discussion() -> None:
    """Have Review show its discussion, from where a comment led away."""
    st.session_state[_RETURN] = True


def take_return() -> bool:
    return st.session_state.pop(_RETURN, False)


def first_layers(last: int) -> tuple[int, int]:
    """The MoE layers that a timeline begins with: those that a comment points to, else the first two. last: the last layer."""
    place, _ = pointed() or (None, 0)
    first = place.number if place is not None and place.kind == "layer" and place.number <= last else 0
    return first, min(first + 1, last)


def refuse(place: str, reason: str) -> None:
    """Remember why something that a person sent could not be written, to be said where they sent it."""
    st.session_state[_REFUSED] = (place, reason)


def take_refusal(place: str) -> str | None:
    """Why what was last sent from a place could not be written; None when it was."""
    if st.session_state.get(_REFUSED, ("", ""))[0] != place:
        return None
    return st.session_state.pop(_REFUSED)[1]


def keep_typed() -> None:
    """Keep what was typed, on a run that cannot draw all fields: Streamlit forgets those that are not there. They hold what
    could not be written, so nothing else need be said of it."""
    st.session_state.pop(_REFUSED, None)
    for key in [key for key in st.session_state if str(key).startswith(TYPED)]:
        with suppress(StreamlitWidgetAlreadyInstantiatedError):  # then it is there
            st.session_state[key] = st.session_state[key]


def written() -> int:
    """How many times this session has written to the team's database: the key of forms that begin anew after that."""
    return st.session_state.get(_WRITTEN, 0)


def count_written() -> None:
    st.session_state[_WRITTEN] = written() + 1


def has_left() -> bool:
    """Whether whoever had this session has logged out: its address is not for who logs in next."""
    return st.session_state.get(_GONE, False)


def leave() -> None:
    st.session_state[_GONE] = True


def is_back() -> bool:
    """Whether the browser is where it wanted to be before a login."""
    return st.session_state.get(_BACK, False)


def come_back() -> None:
    st.session_state[_BACK] = True


def notice(text: str) -> None:
    """Say something after the next rerun."""
    st.session_state[_NOTICE] = text


def take_notice() -> str | None:
    return st.session_state.pop(_NOTICE, None)


def ask_for_run() -> None:
    """Have Optimise run what it has ticked as soon as it is drawn."""
    st.session_state[_RUN] = True


def take_run() -> bool:
    return st.session_state.pop(_RUN, False)


def say_left_out(text: str) -> None:
    """Say what of the stored session could not be opened."""
    st.session_state[_LEFT_OUT] = text


def take_left_out() -> str | None:
    """What of the stored session could not be opened and was not said yet."""
    return st.session_state.pop(_LEFT_OUT, None)


def say_overtaken(overtaken: bool) -> None:
    """Say that another tab has stored a later session, so that this one's is stored no more; or that it no longer is so."""
    st.session_state[_OVERTAKEN] = overtaken


def is_overtaken() -> bool:
    """Whether another tab has stored a later session than this one has."""
    return st.session_state.get(_OVERTAKEN, False)


def say_not_stored(reason: str | None) -> None:
    """Say why the session could not be stored; None: it could."""
    st.session_state[_NOT_STORED] = reason


def not_stored() -> str | None:
    """Why the session could not be stored when it was changed last; None when it could."""
    return st.session_state.get(_NOT_STORED)


def end_if_left() -> None:
    """End the run here if its page was left meanwhile: Streamlit does that wherever a run looks at its session."""
    _NOTICE in st.session_state  # noqa: B015
