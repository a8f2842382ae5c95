"""The exceptions that a person is meant to read, and texts out of files made safe to read."""

import re

HEAD, TAIL = 600, 200
"""Characters of a message that are kept when a file's own text made it longer: the place of the fault stands first, the remedy
often last."""


class InputError(ValueError):
    """A person's input cannot be used. The message is one line that says where the fault is and why.

    Pages show it, the command line prints it and exits with 2. Any other exception is a bug.
    """

    def __init__(self, message: str) -> None:
        line = re.sub(r" at 0x[0-9a-fA-F]+(?=>)", "", one_line(message))  # without the addresses of objects
        super().__init__(line if len(line) <= HEAD + TAIL else f"{line[:HEAD]} … {line[-TAIL:]}")


class StoppedError(InputError):
    """Work was stopped before there was anything to keep."""


class LostRankError(InputError):
    """Another rank of a job is gone, which this one waited for: a consequence, and seldom the cause."""


class UndecidedError(InputError):
    """A choice was left open that has no usual answer: a person has to choose. The message lists the options."""


class IllegalError(ValueError):
    """An answer breaks a rule of its problem."""


def one_line(text: str) -> str:
    """`text` on one line: every run of blanks and line ends becomes one blank, and control characters become harmless."""
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
