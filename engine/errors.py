"""The one exception a person is meant to read."""


class InputError(ValueError):
    """What a person gave cannot be used. The message is one line that says where the fault is and why.

    Pages show it, the command line prints it and exits with 2. Any other exception is a bug.
    """


class StoppedError(InputError):
    """Work was asked to stop before there was anything to keep."""


class UndecidedError(InputError):
    """What was left open has no usual answer: a person has to choose. The message says between what."""


class IllegalError(ValueError):
    """An answer breaks a rule of its problem."""
