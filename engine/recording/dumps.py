"""The files that SGLang's recorder writes on the server's machine, copied from a folder that is reachable here."""

import shutil
import time
import zipfile
from pathlib import Path

from engine.errors import InputError
from engine.files import replace_atomically
from engine.result import Stop

PATTERN = "expert_distribution_recorder_*.pt"
FOLDER_VARIABLE = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
USUAL_FOLDER = "/tmp"
"""Where SGLang writes without that variable."""

QUIET_SECONDS = 10.0
"""Ranks on other machines may write elsewhere: so long without a new byte, and no further file is waited for."""

_LOOK_SECONDS = 0.2


def dumps_in(folder: Path) -> dict[str, int]:
    """Sizes of the recorder's files in a folder, by name. Raises InputError when there is no such folder."""
    try:
        return {path.name: path.stat().st_size for path in folder.glob(PATTERN) if path.is_file()}
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}") from None


def check_folders(source: Path, target: Path) -> None:
    """Raise InputError unless the source can be read and the target be written, before anything is recorded for it."""
    if not source.is_dir():
        raise InputError(f"--from-folder {source}: there is no such folder; name the server's {FOLDER_VARIABLE}")
    dumps_in(source)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{target} cannot be made a folder: {error.strerror}") from None
    if source.resolve() == target.resolve():
        raise InputError(f"{target} is where the server writes already; name another folder with -o")


def wait_for_dumps(folder: Path, before: set[str], files: int, timeout: float, stop: Stop) -> list[Path]:
    """The files of a dump, once all are complete: as many as the ranks write, or those that came before nothing changed for
    `QUIET_SECONDS`. A file of torch.save is a zip archive, whose directory is written last.

    before: names that were there when the recording began
    Raises InputError when none came within `timeout` seconds.
    """
    seen: dict[str, int] = {}
    begin = changed = time.monotonic()
    while True:
        now, look = time.monotonic(), {name: size for name, size in dumps_in(folder).items() if name not in before}
        if look != seen:
            seen, changed = look, now
            time.sleep(_LOOK_SECONDS)
            continue
        complete = [folder / name for name in sorted(seen) if zipfile.is_zipfile(folder / name)]
        if len(complete) >= files or (complete and now - changed > QUIET_SECONDS):
            return complete
        if now - begin > timeout or stop():
            break
        time.sleep(_LOOK_SECONDS)
    if complete:
        return complete
    raise InputError(
        f"{folder}: no file came{' that is complete' if seen else ''} within {timeout:g} s; is it the server's "
        f"{FOLDER_VARIABLE}, on a file system that both see?"
    )


def copy_dumps(dumps: list[Path], target: Path) -> list[Path]:
    """Copies of the files in the folder `target`, each there whole or not at all. Raises InputError."""
    copies = []
    for dump in dumps:
        try:
            with replace_atomically(target / dump.name) as draft:
                shutil.copyfile(dump, draft)
        except OSError as error:
            raise InputError(f"{dump.name} cannot be copied to {target}: {error.strerror}") from None
        copies.append(target / dump.name)
    return copies
