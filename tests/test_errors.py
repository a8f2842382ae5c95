"""What a person reads when something cannot be used is one line of bearable length, whatever a file has in it."""

import pickle

import pytest

from engine.errors import HEAD, TAIL, IllegalError, InputError, StoppedError, UndecidedError
from engine.model import MoEModel


@pytest.mark.parametrize("kind", [InputError, StoppedError, UndecidedError])
def test_a_message_is_one_line_of_bearable_length(kind):
    message = str(kind(f"run.json: 'x\n{'y' * 5000}\x1b[31m' is no number, which it must be"))
    assert len(message) == HEAD + TAIL + 3 and "\n" not in message and "\x1b" not in message
    assert message.startswith("run.json: 'x yyy") and message.endswith("is no number, which it must be")
    assert str(pickle.loads(pickle.dumps(kind(message)))) == message


def test_a_message_of_usual_length_stays_as_it_is():
    message = "run.json: num_experts: must be 1 … 4096"
    assert str(InputError(message)) == message and not issubclass(IllegalError, InputError)


def test_no_message_has_the_address_of_an_object():
    assert str(InputError(f"no number: {object()!r}")) == "no number: <object object>"


def test_a_long_name_does_not_make_a_long_message():
    with pytest.raises(InputError) as error:
        MoEModel.from_dict({"name": "m", "x" * 3000: 1}, "model.json")
    assert len(str(error.value)) < 1000
