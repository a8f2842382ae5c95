"""Failures on a page: a line about each, and a way out."""

import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import streamlit as st

from app import state
from app.tables import plain
from engine import logs
from engine.errors import InputError
from engine.workload import digest_of

LOG = logging.getLogger(logs.OURS)


@contextmanager
def saying(words: Callable[[str], str] = plain) -> Iterator[None]:
    """Say in a line in its place that something cannot be read or written, and let the page go on. words: of the error's."""
    try:
        yield
    except InputError as error:
        st.error(words(str(error)), icon=":material/error:")


@contextmanager
def in_a_line() -> Iterator[None]:
    """Say in a line that something failed.

    A fault of ours gets a number, under which the log has all about it; its text on the page gives nothing away.
    """
    try:
        with saying():
            yield
    except Exception as error:
        apologise(error)


def fragment(function: Callable | None = None, *, run_every: float | None = None) -> Any:
    """`st.fragment` that reports its failures in its place: it runs again by itself, with nothing around it.

    The page's head does not run then either, so the page is drawn anew once another tab has overtaken its session.

    run_every: seconds; None while there is nothing to follow. A request that the server takes up late, as a run has just ended,
        costs the page the end of that run: Streamlit begins another runner and drops the messages of the one before.
    """

    def guarded(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if state.was_overtaken():
                st.rerun()
            with in_a_line():
                return function(*arguments, **options)

        return st.fragment(run, run_every=run_every)

    return guarded if function is None else guarded(function)


def apologise(error: Exception) -> None:
    """Say that the visitor is not to blame, and offer ways on. The same fault has the same number."""
    number = digest_of(*traceback.format_exception(error))[:8]
    LOG.error("a page failed, fault %s", number, exc_info=error)
    with st.container(key=f"failed-{number}"):
        st.error(
            f"This part of the page failed, by a fault of Switchyard. What you have is kept. Fault {number}: the studio's log "
            "tells more.",
            icon=":material/error:",
        )
        with st.container(horizontal=True):
            st.button("Try again", icon=":material/refresh:", key=f"again-{number}")
            st.button(
                "Go on in an empty session",
                icon=":material/restart_alt:",
                key=f"empty-{number}",
                on_click=state.begin_anew,
                help="This one stays under its address.",
            )
