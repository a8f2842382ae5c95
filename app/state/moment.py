"""What is only of the moment: it ends with the browser tab and is not kept."""

import streamlit as st

_WANTS_TWO, _EDIT_ROUND, _TABLE_BASE, _DRAWN = "wants_two", "edit_round", "table_base", "drawn"
_UPLOADS, _WATCHED, _LAYERS = "uploads", "watched", "layers_compared"
_SHOWN, _RUN_FOLDERS = "launch_shown", "run_folders"
_REVIEWED, _REFUSED, _WRITTEN = "reviewed", "refused", "written"
_NOTICE, _LEFT_OUT = "notice", "left_out"


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


def complain(file_id: str, text: str) -> None:
    """Remember why an uploaded file could not be used, for as long as it is in its widget."""
    st.session_state[_UPLOADS][file_id] = text


def complaints(file_ids: list[str]) -> list[str]:
    """The complaints about these files."""
    seen = st.session_state.get(_UPLOADS, {})
    return [seen[id] for id in file_ids if seen.get(id)]


def newly_finished(job: str, finished: bool) -> bool:
    """True once for a job that was seen running before and has finished now."""
    watched = st.session_state.setdefault(_WATCHED, {})
    before, watched[job] = watched.get(job), finished
    return before is False and finished


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


def reviewed() -> tuple[int, str | None] | None:
    """The number of the saved plan that is looked at and the id of its review; None: the list alone."""
    return st.session_state.get(_REVIEWED)


def look_at(number: int | None, review: str | None = None) -> None:
    st.session_state[_REVIEWED] = None if number is None else (number, review)


def refuse(place: str, reason: str) -> None:
    """Remember why something that a person sent could not be written, to be said where they sent it."""
    st.session_state[_REFUSED] = (place, reason)


def take_refusal(place: str) -> str | None:
    """Why what was last sent from a place could not be written; None when it was."""
    if st.session_state.get(_REFUSED, ("", ""))[0] != place:
        return None
    return st.session_state.pop(_REFUSED)[1]


def written() -> int:
    """How many times this session has written to the team's database: the key of forms that begin anew after that."""
    return st.session_state.get(_WRITTEN, 0)


def count_written() -> None:
    st.session_state[_WRITTEN] = written() + 1


def notice(text: str) -> None:
    """Say something after the next rerun."""
    st.session_state[_NOTICE] = text


def take_notice() -> str | None:
    return st.session_state.pop(_NOTICE, None)


def say_left_out(text: str) -> None:
    """Say what of the stored session could not be opened."""
    st.session_state[_LEFT_OUT] = text


def take_left_out() -> str | None:
    """What of the stored session could not be opened and was not said yet."""
    return st.session_state.pop(_LEFT_OUT, None)


def end_if_left() -> None:
    """End the run here if its page was left meanwhile: Streamlit does that wherever a run looks at its session."""
    _NOTICE in st.session_state  # noqa: B015
