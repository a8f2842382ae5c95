"""The kept data: recordings, documents, sessions and simulations as files in the data folder, the team's work in a
database."""

from engine.files import data_folder
from engine.store.files import (
    alone_with_sessions,
    config_path,
    has_workload,
    load_document,
    load_session,
    load_workload,
    save_config,
    save_document,
    save_session,
    save_workload,
    scratch,
    session_written,
)
from engine.store.simulated import (
    figures,
    has_figures,
    is_worth_keeping,
    load_figures,
    load_timeline,
    save_figures,
    save_timeline,
)

__all__ = [
    "alone_with_sessions",
    "config_path",
    "data_folder",
    "figures",
    "has_figures",
    "has_workload",
    "is_worth_keeping",
    "load_document",
    "load_figures",
    "load_session",
    "load_timeline",
    "load_workload",
    "save_config",
    "save_document",
    "save_figures",
    "save_session",
    "save_timeline",
    "save_workload",
    "scratch",
    "session_written",
]
