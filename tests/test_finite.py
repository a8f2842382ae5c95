"""Numbers leave the engine finite or as one line."""

import json
import math

import pandas as pd
import pytest

from engine.compare.figures import Metrics
from engine.errors import InputError
from engine.result import Result, Status
from engine.schema import json_text
from engine.timeline import COLUMNS, Timeline

NO_NUMBERS = pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
REFUSED = pytest.raises(InputError, match="too far apart, or too large")


@NO_NUMBERS
def test_json_has_none_but_finite_numbers(number):
    with REFUSED:
        json_text({"a": [1.0, {"b": number}]})


def test_json_is_what_json_is():
    data = {"b": [1, 2.5, None, True, "…"], "a": {}}
    assert json_text(data) == json.dumps(data)
    assert json_text(data, sort_keys=True, separators=(",", ":")) == '{"a":{},"b":[1,2.5,null,true,"\\u2026"]}'


@NO_NUMBERS
def test_a_result_has_a_finite_objective_and_bound(number):
    for objective, bound in ((number, 0.0), (1.0, number)):
        with REFUSED:
            Result(Status.FEASIBLE, objective, bound, 0.1, None)


@NO_NUMBERS
@pytest.mark.parametrize("column", ["start", "end", "bytes"])
def test_a_timeline_has_finite_times_and_bytes(number, column):
    event = dict.fromkeys(COLUMNS, 0) | {"stream": "compute", "kind": "ffn", column: number}
    with REFUSED:
        Timeline(pd.DataFrame([event]), ("GPU 0",), "simulated", "by hand")


def test_a_gap_above_nothing_is_none_in_json():
    figures = Metrics(
        total=1.0,
        order_bound=0.0,
        order_gap=math.inf,
        bound=0.0,
        gap=math.inf,
        utilisation=0.0,
        exposed_communication=0.0,
        overlap=0.0,
        balance=_Nothing(),
        kept_local=1.0,
        memory=0.0,
        phases=0,
        seconds={},
    )
    assert (figures.to_dict()["gap"], figures.to_dict()["order_gap"]) == (None, None)


class _Nothing:
    """A balance of no layers."""

    balancedness = 1.0

    def to_dict(self) -> dict:
        return {}
