"""The one line with which a call must refuse its input."""

from collections.abc import Callable

import pytest

from engine.errors import InputError


def refusal(call: Callable[..., object], *arguments: object, **options: object) -> str:
    """Return the message of the InputError that a call must raise: one line."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
