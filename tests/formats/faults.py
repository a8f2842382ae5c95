"""What every bad file must be answered with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.formats import read_workload


def refused(path: Path, *parts: str, read: Callable = read_workload, **options: object) -> str:
    """The message of the InputError that reading `path` must raise: one line that begins with the file's name and
    contains `parts`."""
    with pytest.raises(InputError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert message.startswith(path.name)
    assert "\n" not in message
    assert str(path.parent) not in message
    for part in parts:
        assert part in message, message
    return message
