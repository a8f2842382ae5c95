"""What the tests of the pages share."""

from collections.abc import Iterator

import pytest
import streamlit as st
from streamlit.components.v2 import manifest_scanner

from app.state import address
from app.state.session import Session

TOKEN = "test-session"


@pytest.fixture(autouse=True, scope="session")
def packages_are_searched_once() -> Iterator[None]:
    """Every studio looks for components in all installed packages as it starts."""
    manifests = manifest_scanner.scan_component_manifests()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", lambda: manifests)
        yield


class Fields(dict):
    """Stands for `st.session_state`, whose values are attributes too."""

    __getattr__ = dict.__getitem__


@pytest.fixture
def empty_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty session without a page, under TOKEN."""
    monkeypatch.setattr(st, "session_state", Fields())
    address.begin(TOKEN, Session())
