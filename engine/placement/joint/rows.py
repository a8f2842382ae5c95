"""Balance against rows, for tokens that go home after every layer and with one row serve several experts.

Hops between layers then cost nothing. A placement sends as many rows as a token's experts of a layer are on GPUs (or nodes),
so layers depend on each other only through the limit on moves and through which recording is the worst. The search is that of
`search`, with the exact change of rows of every swap from the tables of `coactivation`, one table a recording and layer. Its
starts and the lower limit of rows are found and proven by `coactivation`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import comb

import numpy as np

from engine.errors import InputError
from engine.placement.coactivation import coactivation
from engine.placement.coactivation.instance import CoactivationInstance, Nets, nets_between
from engine.placement.coactivation.search import swap, tables_of
from engine.placement.joint.instance import JointFigures, JointInstance, equal_slots
from engine.placement.joint.state import JointState, JointTerms
from engine.result import Floats, Ints, Limits, Stop, never


@dataclass(frozen=True, eq=False)
class RowsInstance(JointInstance):
    """A joint instance with rows for affinity: `hop_cost_share` of its figures is rows / rows expected of a blind placement,
    `kept_share` 1 less that (so below 0 where more rows are sent). Made by `rows_instance`.

    recordings: the choices of every workload's tokens; all of the same cluster and way of travelling. A recording without
        tokens sends no rows.
    least_rows: float64[workload], rows that every placement sends at least, proven elsewhere; None: none
    """

    recordings: tuple[CoactivationInstance, ...] = ()
    least_rows: Floats | None = None

    @property
    def gpus_alike(self) -> bool:
        """Never: tokens are sent from GPUs that have names."""
        return False

    @cached_property
    def random_hop_cost_share(self) -> float:
        """1: the share is of a blind placement's already."""
        return 1.0

    @cached_property
    def nets(self) -> list[list[Nets]]:
        """[workload][layer], of recordings without tokens []."""
        return [
            [nets_between(recording, layer) for layer in range(self.layers)] if recording.experts.shape[1] else []
            for recording in self.recordings
        ]

    @cached_property
    def blind_rows(self) -> Floats:
        """float64[workload]: rows expected of a placement drawn blindly, layer by layer."""
        return np.array([sum(map(_blind_rows, layers)) for layers in self.nets], dtype=np.float64)

    @cached_property
    def per_row(self) -> Floats:
        """float64[workload]: a row's part in the hop cost share."""
        return np.divide(1.0, self.blind_rows, out=np.zeros(self.workloads), where=self.blind_rows > 0)

    def rows(self, gpu_of_expert: Ints) -> Ints:
        """int64[workload]: rows that a placement int64[layer, expert] sends in all layers."""
        group = gpu_of_expert // self.recordings[0].group_size
        return np.array(
            [sum(nets.rows(group[layer]) for layer, nets in enumerate(layers)) for layers in self.nets], dtype=np.int64
        )

    def rows_a_token(self, gpu_of_expert: Ints) -> Floats:
        """float64[workload]: mean rows of a token in a layer; 0 without tokens."""
        return self.rows(gpu_of_expert) / np.maximum(self.tokens, 1)

    @cached_property
    def tokens(self) -> Ints:
        """int64[workload]: tokens with an expert, summed over layers."""
        return np.array([(each.experts >= 0).any(axis=2).sum() for each in self.recordings])

    def figures(self, gpu_of_expert: Ints) -> JointFigures:
        """The figures of any placement int64[layer, expert]."""
        share = self.rows(gpu_of_expert) * self.per_row
        return JointFigures(share, 1 - share, *self.balance(gpu_of_expert))


def rows_instance(recordings: tuple[CoactivationInstance, ...], load: Floats) -> RowsInstance:
    """The instance of these recordings. Raises InputError where they differ in more than their tokens.

    load: float64[workload, layer, expert], tokens
    """
    kinds = {(each.gpus, each.node_size, each.travel, each.expert_count) for each in recordings}
    if len(kinds) != 1:
        raise InputError("recordings: wanted the same GPUs, nodes, experts and way of travelling in all")
    workloads, layers, experts = load.shape
    # Never written to, so that these zeros take no memory.
    nothing = np.broadcast_to(0.0, (workloads, layers - 1, experts, experts))
    return RowsInstance(nothing, load, equal_slots(experts, recordings[0].gpus), recordings=recordings)


def _blind_rows(nets: Nets) -> float:
    """Rows expected of a layer: every group is touched by a token with the same probability, which its experts decide."""
    size = nets.experts // nets.groups
    missed = [comb(nets.experts - size, chosen) / comb(nets.experts, chosen) for chosen in range(nets.member.shape[1] + 1)]
    chosen = (nets.member >= 0).sum(axis=1)
    return float((1 - np.array(missed)[chosen]) @ nets.price.sum(axis=1))


class RowsTerms(JointTerms):
    """The objective with rows in the place of hops.

    per_row: float64[workload], the objective's part of a row; where the mean counts, divided by the workloads already
    """

    instance: RowsInstance

    def __init__(self, instance: RowsInstance, weight: float, worst: bool) -> None:
        super().__init__(instance, weight, worst)
        self.per_row = instance.per_row * (weight if self.worst else weight / instance.workloads)

    def _hop(self) -> Floats:
        return self.instance.transitions[:1]  # all 0, as hops cost nothing

    def least_affinity(self, stop: Stop = never) -> float:
        """Lower limit of rows / blind rows over the workloads, as proven elsewhere."""
        if self.instance.least_rows is None:
            return 0.0
        share = self.instance.least_rows * self.instance.per_row
        return float(share.max() if self.worst else share.mean())


class RowsState(JointState):
    """A placement with the tables of its rows; `hops` are the objective's part of the rows, float64[workload]."""

    terms: RowsTerms
    linked = False

    def _reset_hops(self) -> None:
        instance = self.terms.instance
        self.group_size = instance.recordings[0].group_size
        group = self.place // self.group_size
        self.tables = [[tables_of(nets, group[layer]) for layer, nets in enumerate(of)] for of in instance.nets]
        self.rows = instance.rows(self.place)
        self.hops = self.rows * self.terms.per_row

    def _row_changes(self, workload: int, layer: int) -> Ints:
        """int64[expert, expert]: rows that a swap of two experts adds."""
        tables = self.tables[workload][layer]
        change = tables.joining[tables.group].astype(np.int64)
        change += tables.shared
        change -= tables.alone[:, None]
        change += change.T.copy()
        change[tables.group[:, None] == tables.group] = 0
        return change

    def _hop_changes(self, layer: int) -> Floats:
        changes = np.zeros((len(self.tables), self.experts, self.experts))
        for workload, tables in enumerate(self.tables):
            if tables:
                np.multiply(self._row_changes(workload, layer), self.terms.per_row[workload], out=changes[workload])
        return changes

    def _swap_hops(self, layer: int, first: int, second: int) -> None:
        if self.place[layer, first] // self.group_size == self.place[layer, second] // self.group_size:
            return
        for workload, of_layer in enumerate(self.tables):
            if of_layer:
                tables = of_layer[layer]
                own, other = tables.group[first], tables.group[second]
                change = int(tables.joining[own, second]) - int(tables.alone[first]) + int(tables.shared[first, second])
                change += int(tables.joining[other, first]) - int(tables.alone[second]) + int(tables.shared[second, first])
                self.rows[workload] += change
                swap(tables, self.terms.instance.nets[workload][layer], first, second)
        self.hops = self.rows * self.terms.per_row


def terms_of(instance: JointInstance, weight: float, worst: bool) -> JointTerms:
    """The objective of an instance, of hops or of rows."""
    return (RowsTerms if isinstance(instance, RowsInstance) else JointTerms)(instance, weight, worst)


def state_of(terms: JointTerms, place: Ints, start: Ints | None, max_moves: int | None) -> JointState:
    """The state of a placement under an objective of hops or of rows; see `JointState`."""
    return (RowsState if isinstance(terms, RowsTerms) else JointState)(terms, place, start, max_moves)


CAP = 1.05
"""Load of the busiest GPU, against the mean, under which a placement to begin from is looked for. One gets all the time: with
three caps the searches ended 0.5 % higher on recorded tokens."""
BOUND_SHARE = 0.5
"""Part of the time for the bounds."""


def with_starts(instance: RowsInstance, limits: Limits, stop: Stop = never) -> tuple[RowsInstance, tuple[Ints, ...]]:
    """(the instance with `least_rows`, placements int64[layer, expert] to begin from), within the limits.

    Bounds are of every recording alone, without a cap, so that they hold of every placement, and a placement comes with each;
    another is of all recordings' tokens together, under a cap on load. The wall limit is that of each of these.
    """
    known = [recording for recording in instance.recordings if recording.experts.shape[1]]
    least, places = np.zeros(instance.workloads), []
    for workload, recording in enumerate(instance.recordings):
        if recording.experts.shape[1]:
            part = replace(limits, seconds=BOUND_SHARE * limits.seconds / len(known), exact=True)
            result = coactivation(replace(recording, cap=None), part, stop)
            least[workload] = result.bound
            places.append(result.solution)
    part = replace(limits, seconds=(1 - BOUND_SHARE) * limits.seconds, exact=False)
    most = max(recording.experts.shape[2] for recording in known)
    padding = [((0, 0), (0, 0), (0, most - each.experts.shape[2])) for each in known]
    experts = [np.pad(each.experts, wide, constant_values=-1) for each, wide in zip(known, padding, strict=True)]
    source = np.concatenate([each.source_gpu for each in known])
    together = replace(known[0], experts=np.concatenate(experts, axis=1), source_gpu=source, cap=CAP)
    places.append(coactivation(together, part, stop).solution)
    return replace(instance, least_rows=least), tuple(places)
