"""Why a predicted time per token is off: the kinds of work that could explain a measured one, the likeliest first."""

from typing import NamedTuple

import numpy as np

from engine.serving.forecast import Factors, Forecast, fitted
from engine.serving.parts import FACTORS, PARTS


class Explanation(NamedTuple):
    """One kind of work that alone would explain the difference.

    seconds: predicted of it for a token
    times: so many times as long it would take
    usual: engines, GPUs and versions differ in it by this factor, as the fit has it
    """

    kind: str
    seconds: float
    times: float
    usual: float


def seconds_of_kinds(forecast: Forecast) -> dict[str, float]:
    """Predicted seconds of a token by kind of work."""
    spent: dict[str, float] = {}
    for part, seconds in forecast.parts.items():
        spent[PARTS[part]] = spent.get(PARTS[part], 0.0) + seconds
    return spent


def explanations(forecast: Forecast, token: float, factors: Factors | None = None) -> list[Explanation]:
    """The kinds of work that could explain a measured token; those that would have to change least against how much they
    usually differ come first. A kind that takes less than the difference cannot explain a faster one, and is left out.

    token: seconds measured
    factors: those of the forecast; None: those that come with Switchyard
    """
    logarithms = np.log(np.array(list((factors or fitted()).kinds.values())))
    usual = dict(zip(FACTORS, np.exp(np.sqrt((logarithms**2).mean(axis=0))).tolist(), strict=True))
    found = []
    for kind, seconds in seconds_of_kinds(forecast).items():
        needed = seconds + token - forecast.token
        if needed > 0:
            found.append(Explanation(kind, seconds, needed / seconds, usual[kind]))
    return sorted(found, key=lambda each: abs(np.log(each.times)) / max(np.log(each.usual), 1e-3))
