"""What a launch knows of the links between its ranks: how fast each is, and what a send takes beside its bytes."""

from dataclasses import dataclass

import numpy as np

from engine.costs import fit_line
from engine.launch.rank.instructions import RankInstructions
from engine.network import Network
from engine.units import digits, seconds


@dataclass(frozen=True, eq=False)
class Links:
    """rates: float64[rank] bytes/s of every rank's link in each direction; start_up: seconds of a send beside its bytes"""

    rates: np.ndarray
    start_up: float = 0.0

    @property
    def network(self) -> Network:
        """All ranks on one fabric."""
        nothing = np.zeros(len(self.rates))
        return Network(self.rates, self.rates, nothing, np.arange(len(self.rates)), self.start_up, nothing)

    @property
    def text(self) -> str:
        """What a prediction takes from them, in words."""
        slowest, fastest = (digits(rate * 8 / 1e6) for rate in (self.rates.min(), self.rates.max()))
        rates = slowest if slowest == fastest else f"{slowest} to {fastest}"
        return f"links of {rates} Mbit/s, a start-up of {seconds(self.start_up)} for every send"


def links_of(instructions: RankInstructions, measured: dict[str, list]) -> Links | None:
    """The links as known before the launch, or all alike and as fast as they were measured. None for a single rank.

    measured: as `measure_machine` gives it. The start-up is that of a send to one peer, which is what every phase and every
    send of a sequence costs; where all are sent to at once they start together.
    """
    if not measured["network"]:
        return None
    per_byte = fit_line(*np.array(measured["network"]).T).beta
    rates = (
        np.full(instructions.ranks, 1 / max(per_byte, 1e-15))
        if instructions.bandwidth is None
        else np.array(instructions.bandwidth)
    )
    sent, took = np.array(measured["phases"]).T
    return Links(rates, max(0.0, float(np.median(took - sent / rates.min()))))
