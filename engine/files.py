"""Files that others read while they are written."""

import secrets
from pathlib import Path

TAIL = 65536  # bytes


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by `text`: a reader sees the old content or the new, also when the writer is killed midway."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def tail(path: Path) -> bytes:
    """The end of a file, as much as anybody wants to see; empty when there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            return file.read()
    except FileNotFoundError:
        return b""
