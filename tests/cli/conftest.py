"""The command line, called in this process."""

import pytest

from tests.cases.cli import CommandLine


@pytest.fixture
def engine(capsys) -> CommandLine:
    """Calls commands and returns their exit codes and outputs."""
    return CommandLine(capsys)
