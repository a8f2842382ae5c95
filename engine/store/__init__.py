"""What is kept: recordings, documents and sessions as files in the data folder, the team's work in a database."""

from engine.data_folder import data_folder
from engine.store.files import (
    alone_with_sessions,
    config_path,
    has_timeline,
    has_workload,
    load_document,
    load_session,
    load_timeline,
    load_workload,
    save_config,
    save_document,
    save_session,
    save_timeline,
    save_workload,
    scratch,
    session_written,
)

__all__ = [
    "alone_with_sessions",
    "config_path",
    "data_folder",
    "has_timeline",
    "has_workload",
    "load_document",
    "load_session",
    "load_timeline",
    "load_workload",
    "save_config",
    "save_document",
    "save_session",
    "save_timeline",
    "save_workload",
    "scratch",
    "session_written",
]
