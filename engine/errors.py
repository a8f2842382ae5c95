"""The one exception a person is meant to read, and how a text out of a file becomes fit to be read."""

import re

HEAD, TAIL = 600, 200
"""Characters of a message that are kept where a file's own text made it longer: where the fault is stands first, what would
have been right often last."""


class InputError(ValueError):
    """What a person gave cannot be used. The message is one line that says where the fault is and why.

    Pages show it, the command line prints it and exits with 2. Any other exception is a bug.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_readable(message))


class StoppedError(InputError):
    """Work was asked to stop before there was anything to keep."""


class UndecidedError(InputError):
    """What was left open has no usual answer: a person has to choose. The message says between what."""


class IllegalError(ValueError):
    """An answer breaks a rule of its problem."""


def one_line(text: str) -> str:
    """`text` with every run of blanks and line ends as one blank, and control characters made harmless."""
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))


def _readable(message: str) -> str:
    """`message` as one line of bearable length, without the addresses of objects."""
    line = re.sub(r" at 0x[0-9a-fA-F]+(?=>)", "", one_line(message))
    return line if len(line) <= HEAD + TAIL else f"{line[:HEAD]} … {line[-TAIL:]}"
