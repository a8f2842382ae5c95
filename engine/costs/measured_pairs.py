"""Measured pairs of GPUs as they are kept, to be looked at beside what a cluster has for them."""

from typing import Self

import numpy as np
from pydantic import Field, model_validator

from engine.cluster import MOST_GPUS, Cluster
from engine.columns import Amounts, Integers
from engine.costs.pair_cluster import PairCluster, PairTimes, held_against, node_name
from engine.schema import Frozen


class MeasuredPairs(Frozen):
    """Pairs that ran alone, a row each. hosts, buses: of every GPU, GPUs of a host together; first, second: both GPUs of a pair
    by their place there; rate: bytes/s of both ways at once."""

    hosts: tuple[str, ...] = Field(min_length=2, max_length=MOST_GPUS)
    buses: tuple[str, ...]
    first: Integers
    second: Integers
    rate: Amounts

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.buses) != len(self.hosts):
            raise ValueError("every GPU needs a host and a bus")
        if not len(self.first) == len(self.second) == len(self.rate):
            raise ValueError("every pair needs two GPUs and a rate")
        if not len(self.rate):
            raise ValueError("no pair was measured")
        if not ((self.first >= 0).all() and (self.first < self.second).all() and self.second.max() < len(self.hosts)):
            raise ValueError(f"a pair is two of the {len(self.hosts)} GPUs, the first of them first")
        if not (self.rate > 0).all():
            raise ValueError("a rate is above 0")
        return self

    @classmethod
    def of(cls, pairs: PairTimes) -> Self:
        """Their rates, without start-ups."""
        first, second = np.nonzero(np.triu(np.isfinite(pairs.rate), 1))
        return cls(hosts=pairs.hosts, buses=pairs.buses, first=first, second=second, rate=pairs.rate[first, second])

    def beside(self, cluster: Cluster) -> PairCluster | None:
        """The pairs beside what the cluster has for them; None for a cluster whose nodes are not these hosts with as many GPUs
        each, in this order."""
        if [node.name for node in cluster.nodes for _ in node.gpus] != [node_name(host) for host in self.hosts]:
            return None
        measured = np.full((len(self.hosts), len(self.hosts)), np.nan)
        measured[self.first, self.second] = measured[self.second, self.first] = self.rate
        return held_against(cluster, self.hosts, self.buses, measured)
