"""The folder that everything is kept in. It stands apart from what reads the files there, which a rank has no use for."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from engine.errors import InputError
from engine.files import PRIVATE, make_folder


def data_folder() -> Path:
    """The folder from SWITCHYARD_DATA, or `.switchyard` in the project's root; made if missing, and its owner's alone, as
    whoever can read the name of a session can open it."""
    folder = Path(os.environ.get("SWITCHYARD_DATA") or Path(__file__).parents[1] / ".switchyard").resolve()
    try:
        make_folder(folder)
        about = folder.stat()
    except OSError as error:
        raise InputError(f"the data folder {folder} cannot be made ({error.strerror}); set SWITCHYARD_DATA") from None
    open_to_others = stat.S_IMODE(about.st_mode) & ~PRIVATE
    if open_to_others and about.st_uid == os.geteuid() and not about.st_mode & stat.S_ISVTX:  # as /tmp has
        with suppress(OSError):  # of a volume that is mounted to be read
            folder.chmod(PRIVATE)
    return folder
