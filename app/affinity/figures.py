"""The figures of the Affinity page: what stays on its GPU and node, what could at most, and what would by chance."""

from dataclasses import dataclass

import numpy as np
import streamlit as st

from app import layer_hops, widgets
from app.charts import affinity as charts
from engine import units
from engine.cluster import Cluster
from engine.plan import Placement


@dataclass(frozen=True, eq=False)
class Hops:
    """What the figures are about. digest: of the open routing log; hops: float64[layer - 1], hops from each layer to the
    next, between first choices or all of them."""

    digest: str
    first_choice: bool
    hops: np.ndarray
    placement: Placement
    cluster: Cluster
    unit: str

    def show(self) -> None:
        """All figures, by GPU and by node, and the chart of every layer pair."""
        gpus, nodes = len(self.cluster.gpus), len(self.cluster.nodes)
        covers = (
            "proven limit for placements with equally many experts on every GPU and no replicas, from singular values"
        )
        if not (self.placement.single and len(np.unique(self.placement.slots)) == 1):
            covers += "; the placement shown is not one of them"
        kept = layer_hops.kept_by_pair(self.digest, self.first_choice, self.placement, tuple(range(gpus)))
        limit, chance = self._limits(gpus), self._by_chance(np.arange(gpus))
        self._metrics("GPU", kept, limit, chance, covers)
        if gpus > nodes > 1:
            node_of_gpu = self.cluster.node_of_gpu
            stays = layer_hops.kept_by_pair(self.digest, self.first_choice, self.placement, tuple(node_of_gpu.tolist()))
            equal = len({len(node.gpus) for node in self.cluster.nodes}) == 1
            most = self._limits(nodes) if equal else None
            self._metrics("node", stays, most, self._by_chance(node_of_gpu), covers)
        widgets.chart(charts.kept_by_pair(kept, limit, self._whole(chance), self.unit), "affinity-kept")

    def _whole(self, by_pair: np.ndarray) -> float:
        """A share of every layer pair as one of all hops."""
        return float(np.nansum(by_pair * self.hops) / self.hops.sum())

    def _by_chance(self, group_of_gpu: np.ndarray) -> np.ndarray:
        """float64[layer - 1]: what would stay in its group (GPU or node) if any expert followed any other equally often."""
        part = self.placement.share.mean(axis=1) @ np.eye(len(self.cluster.gpus))[group_of_gpu]
        return (part[:-1] * part[1:]).sum(axis=1)

    def _limits(self, groups: int) -> np.ndarray | None:
        """float64[layer - 1]: no placement keeps a larger share in `groups` equal groups; None where there are none."""
        if self.placement.experts % groups:
            return None
        most = layer_hops.keep_limits(self.digest, self.first_choice, groups)
        return np.divide(most, self.hops, out=np.full(len(most), np.nan), where=self.hops > 0)

    def _metrics(self, what: str, kept: np.ndarray, limit: np.ndarray | None, chance: np.ndarray, covers: str) -> None:
        """Three figures in a row: what stays on a `what`, what could, and what would by chance. Each as wide as its name, which
        has to be short: the row has less than 300 pixels in a window of 1024."""
        with st.container(horizontal=True, gap="xsmall"):
            about = f"share of hops that stay on their {what}, all layers"
            st.metric(f"On {what}", units.share(self._whole(kept)), width="content", help=about)
            if limit is not None:
                st.metric("Upper bound", units.share(self._whole(limit)), width="content", help=covers)
            by_chance = "if the next expert were chosen at random"
            st.metric("By chance", units.share(self._whole(chance)), width="content", help=by_chance)
