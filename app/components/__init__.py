"""Small components of a page: hover on a Gantt chart, the name and the last sessions kept in the browser, a
scroll mark, and the way back from a
login."""

from collections.abc import Callable
from pathlib import Path

import streamlit as st

_dim_others_component = st.components.v2.component(
    "dim_others", js=(Path(__file__).parent / "dim_others.js").read_text(encoding="utf-8")
)


def dim_others_on_hover(key: str) -> None:
    """Dim all bars but those of the same work while the pointer is over a bar of the chart with a key.

    The same work has the same first line in the bars' tips, such as the dispatch of a layer, on all lanes and in all plans.
    """
    _dim_others_component(data={"chart": key}, key=f"dim-others-{key}")


KEY = "own-name"
_own_name_component = st.components.v2.component(
    "own_name", js=(Path(__file__).parent / "own_name.js").read_text(encoding="utf-8")
)


def remember_name(name: str | None, recall: Callable[[str], None]) -> None:
    """Keep a name in the browser; without one, call back with the name that the browser keeps, at the run that comes then.

    Every link to a plan begins a session, which does not know the person.
    """
    _own_name_component(
        data={"name": name or ""},
        key=KEY,
        default={"name": ""},
        on_name_change=lambda: recall((st.session_state.get(KEY) or {}).get("name") or ""),
    )


SESSIONS = "last-sessions"
_last_sessions_component = st.components.v2.component(
    "last_sessions", js=(Path(__file__).parent / "last_sessions.js").read_text(encoding="utf-8")
)


def remember_session(token: str | None, person: str, recall: Callable[[list[str]], None]) -> None:
    """Keep a session's token in the browser; without one, call back with those that it keeps, the newest first.

    person: tells people of one browser apart who log in
    """
    _last_sessions_component(
        data={"token": token or "", "person": person},
        key=SESSIONS,
        default={"tokens": []},
        on_tokens_change=lambda: recall((st.session_state.get(SESSIONS) or {}).get("tokens") or []),
    )


_scroll_here_component = st.components.v2.component(
    "scroll_here", js=(Path(__file__).parent / "scroll_here.js").read_text(encoding="utf-8"), html="<span></span>"
)


def scroll_here_once(turn: int) -> None:
    """Scroll here when this is first drawn with a turn; later runs leave the page where the person has it."""
    _scroll_here_component(data={"turn": turn}, key="scroll-here")


_way_back_component = st.components.v2.component(
    "way_back", js=(Path(__file__).parent / "way_back.js").read_text(encoding="utf-8")
)


def note_address() -> None:
    """Keep the address of the page in the browser during a login; call at every run from which somebody may go to one."""
    # The browser looks at its address again only where something here is new.
    at = {"page": st.context.url, "query": st.query_params.to_dict()}
    _way_back_component(data={"leaving": True, "at": at}, key="way-back-leaving")


def return_to_address(on_done: Callable[[], None]) -> None:
    """Go to the address that was kept, if one was.

    on_done: called once the browser has looked and stays. Until then a run may have been broken off before the browser saw this
        component, so draw it again.
    """
    _way_back_component(data={"leaving": False}, key="way-back", default={"done": False}, on_done_change=on_done)
