"""Ends of a check: it holds and has something to say, it does not hold, or it does not apply."""


class CheckError(Exception):
    """The fault, for a person."""


class SkipError(Exception):
    """Why a check does not apply here, for a person."""


def needs(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckError(otherwise)
