"""The mark of tests that need the measured tables."""

import pytest

from engine.costs.silicon import installed_package
from engine.errors import InputError


def _missing() -> str:
    try:
        installed_package()
    except InputError as error:
        return str(error)
    return ""


needs_tables = pytest.mark.skipif(bool(_missing()), reason=_missing())
