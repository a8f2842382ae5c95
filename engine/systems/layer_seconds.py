"""What a placement of one layer takes, kept up to date while a search exchanges experts."""

import numpy as np

from engine.problem import Problem


def expert_seconds(problem: Problem, layer: int) -> np.ndarray:
    """float64[gpu, expert]: what every GPU would need for every expert's tokens."""
    tokens = problem.demand[layer].sum(axis=0)
    gpus = problem.cluster.gpus
    of_kind = {gpu: problem.cost.expert_ffn(gpu, tokens, problem.model) for gpu in dict.fromkeys(gpus)}
    return np.array([of_kind[gpu] for gpu in gpus])


def tokens_nearby(problem: Problem, layer: int) -> np.ndarray:
    """float64[gpu, expert]: token copies for every expert that need not cross the fabric if it is on the GPU: its own and
    those of the GPUs that it is linked with."""
    group = linked_group(problem)
    of_group = np.zeros((group.max() + 1, problem.workload.num_experts))
    np.add.at(of_group, group, problem.demand[layer])
    return of_group[group]


def linked_group(problem: Problem) -> np.ndarray:
    """int64[gpu]: the same number for GPUs that talk over the links of their node."""
    network = problem.network
    alone = len(network.node) + np.arange(network.gpus)
    return np.unique(np.where(network.link > 0, network.node, alone), return_inverse=True)[1]


class LayerSeconds:
    """What a placement int64[expert] of one layer takes, start-up times left out: the slowest GPU's FFNs, and dispatch and
    combine each at its busiest port.

    Called with placements that differ little from one another, as those of a search do, it only moves the experts that
    moved since the last call: microseconds where all pairs of GPUs would take tens of milliseconds.
    """

    def __init__(self, problem: Problem, layer: int) -> None:
        network = problem.network
        self.cost, self.network, self.gpus = problem.cost, network, network.gpus
        size = problem.demand[layer] * problem.model.bytes_per_token
        near = tokens_nearby(problem, layer) * problem.model.bytes_per_token
        self.compute = expert_seconds(problem, layer)
        self.from_far = np.maximum(size.sum(axis=0) - near, 0.0)
        self.from_peers = np.maximum(near - size, 0.0)
        self.size = np.ascontiguousarray(size.T)  # float64[expert, source gpu]
        group = linked_group(problem)
        self.together = [np.flatnonzero(group == own) for own in group]
        self.peers = [members[members != gpu] for gpu, members in enumerate(self.together)]
        self.link = np.where(network.link > 0, network.link, 1.0)
        self.linked = any(len(members) for members in self.peers)
        self.place: np.ndarray | None = None

    def __call__(self, gpu_of_expert: np.ndarray) -> float:
        moved = np.arange(0) if self.place is None else np.flatnonzero(gpu_of_expert != self.place)
        if self.place is None or 4 * len(moved) > len(gpu_of_expert):
            self._begin(gpu_of_expert)
        else:
            for expert in moved.tolist():
                self._move(expert, int(self.place[expert]), -1.0)
                self._move(expert, int(gpu_of_expert[expert]), 1.0)
            self.place = gpu_of_expert.copy()
        return self._seconds()

    def afresh(self, gpu_of_expert: np.ndarray) -> float:
        """The same without the round-off of calls before."""
        self._begin(gpu_of_expert)
        return self._seconds()

    def _seconds(self) -> float:
        network, sent, received = self.network, self.sent, self.received
        within = 0.0
        if self.linked:
            within = (np.maximum(self.sent_inside, self.received_inside) / self.link).max()
        dispatch = max((sent / network.send).max(), (received / network.receive).max(), within)
        combine = max((received / network.send).max(), (sent / network.receive).max(), within)
        return float(self.cost.together(self.ffn).max() + dispatch + combine)

    def _begin(self, gpu_of_expert: np.ndarray) -> None:
        """Bytes and seconds of every GPU, float64[gpu], afresh."""
        self.place = gpu_of_expert.copy()
        self.ffn, self.received, self.received_inside = np.zeros((3, self.gpus))
        self.sent, self.sent_inside = self.size.sum(axis=0), np.zeros(self.gpus)
        for expert, gpu in enumerate(gpu_of_expert.tolist()):
            self._move(expert, gpu, 1.0)

    def _move(self, expert: int, gpu: int, sign: float) -> None:
        """Put an expert on a GPU, or with sign -1 take it away."""
        self.ffn[gpu] += sign * self.compute[gpu, expert]
        self.received[gpu] += sign * self.from_far[gpu, expert]
        self.received_inside[gpu] += sign * self.from_peers[gpu, expert]
        size = self.size[expert]
        self.sent[self.together[gpu]] -= sign * size[self.together[gpu]]
        self.sent_inside[self.peers[gpu]] += sign * size[self.peers[gpu]]
