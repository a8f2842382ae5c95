"""Rules that answers keep."""

from engine.errors import IllegalError


def illegal_if(broken: bool, says: str) -> None:
    if broken:
        raise IllegalError(says)
