"""Prediction of the experts that a batch will choose in the next layer, from those its tokens chose in the last ones.

Lina section 5.2. A path is the experts of a token in `path_length` consecutive layers, one expert per layer (of several
choices the first). The profile holds, for every path of a recording, how often each expert followed it. Of that
distribution a token counts the `top_k` likeliest experts only, with their probabilities as they are: the paper does not
scale them to 1, so the estimates of a batch sum to less than 1 unless top_k is the number of experts. The paper leaves two
rules open, decided here: of equally likely experts the lower id comes first, and a path that the recording does not have is
followed by the choices of all its tokens in that layer.
"""

import time
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.result import Floats, Ints, Result, Status, result_of

CODE_LIMIT = 2**62


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """The experts that followed the paths ending in one layer, the likeliest of a path first.

    paths: the paths by number; one number more stands for any other path and has the experts that followed all tokens
    first: int64[path + 2], the begins of the paths' entries, and the end of the last
    expert, probability: int64 and float64[entry]
    """

    paths: "_Paths"
    first: Ints
    expert: Ints
    probability: Floats

    def estimate(self, paths: Ints, top_k: int, num_experts: int) -> Floats:
        """float64[expert]: mean over the tokens of the truncated probabilities. paths: int[token, path], not empty."""
        tokens_of_path = np.bincount(self.paths.find(paths), minlength=len(self.first) - 1)
        used = np.flatnonzero(tokens_of_path)
        first, entries, weight = self.first[used], np.diff(self.first)[used], tokens_of_path[used] / len(paths)
        estimate = np.zeros(num_experts)
        for rank in range(min(top_k, int(entries.max(initial=0)))):
            has = entries > rank
            entry = first[has] + rank
            estimate += np.bincount(self.expert[entry], weight[has] * self.probability[entry], num_experts)
        return estimate


@dataclass(frozen=True, eq=False)
class PathProfile:
    """The experts that followed the paths of a recording. layers: by the layer that a path ends in, counted from 0."""

    path_length: int
    num_experts: int
    layers: dict[int, LayerProfile]

    def estimate(self, paths: Ints, layer: int, top_k: int) -> Floats:
        """float64[expert]: predicted popularity of the experts of `layer` + 1, at most 1 in all.

        paths: int[token, path], the batch's experts in layers layer - path_length + 1 … layer; -1 (no choice) makes a
        path unknown. Raises InputError for another shape, an empty batch, ids that do not exist, a layer that was not
        profiled and a top_k below 1.
        """
        paths = _ids(paths, self.num_experts, "paths")
        if paths.shape[1] != self.path_length or not len(paths):
            raise InputError(
                f"paths: shape {list(paths.shape)}; wanted at least one token and the experts of "
                f"{self.path_length} layers of each"
            )
        if layer not in self.layers:
            known = f"{min(self.layers)} … {max(self.layers)}" if self.layers else "none"
            raise InputError(f"layer {layer} was not profiled (profiled: {known})")
        if not 1 <= top_k <= self.num_experts:
            raise InputError(f"top_k: {top_k}; wanted 1 … {self.num_experts}, the number of experts")
        return self.layers[layer].estimate(paths, top_k, self.num_experts)


def profile_paths(experts: Ints, num_experts: int, path_length: int, layers: range | None = None) -> PathProfile:
    """Count the experts that followed every path of a recording.

    experts: int[token, layer], ids 0 … num_experts - 1, -1 = no choice (such a token is left out wherever it lacks one)
    layers: the layers in which paths may end, counted from 0; all that a path and a next layer fit round by default

    Raises InputError for wrong shapes, ids or path lengths, and for a next layer in which no token chose an expert.
    """
    experts = _ids(experts, num_experts, "experts")
    depth = experts.shape[1]
    if not 1 <= path_length < depth:
        raise InputError(
            f"path_length: {path_length}; with {depth} layers recorded it can be 1 … {depth - 1}, for the layer after "
            "the path must be recorded too"
        )
    possible = range(path_length - 1, depth - 1)
    wanted = possible if layers is None else layers
    for layer in wanted:
        if layer not in possible:
            raise InputError(
                f"layer {layer}: a path of {path_length} layers with a next layer in a recording of {depth} can end in "
                f"layers {possible.start} … {possible.stop - 1}"
            )
    return PathProfile(path_length, num_experts, {end: _count(experts, num_experts, path_length, end) for end in wanted})


def estimate_devices(
    train: Ints, test_prefix: Ints, layer: int, path_length: int, top_k: int, num_experts: int, devices: int
) -> Result[Floats]:
    """Lina's equation 1: the number of devices each expert of `layer` + 1 deserves; `solution` is n_e float64[expert].

    n_e = devices x mean over the batch's tokens of the truncated probability of e after the token's path. Nothing is
    optimised: `objective` is the sum of n_e, and `bound` the same.

    train: int[token, layer]
    test_prefix: int[token, path], see `PathProfile.estimate`

    Raises InputError as `profile_paths` and `estimate` do, and for fewer than one device.
    """
    start = time.perf_counter()
    if devices < 1:
        raise InputError(f"devices: {devices}; wanted at least 1")
    profile = profile_paths(train, num_experts, path_length, range(layer, layer + 1))
    devices_of_expert = devices * profile.estimate(test_prefix, layer, top_k)
    total = float(devices_of_expert.sum())
    options = {"layer": layer, "path_length": path_length, "top_k": top_k, "devices": devices}
    return result_of("estimate_devices", start, Status.OPTIMAL, total, total, devices_of_expert, options)


def most_popular(popularity: Floats, count: int) -> Ints:
    """int64[count]: the most popular experts, the first one first; of equals the lower id. popularity: [expert]."""
    return np.argsort(-np.asarray(popularity), kind="stable")[:count]


def _count(experts: Ints, num_experts: int, path_length: int, end: int) -> LayerProfile:
    path, following = experts[:, end - path_length + 1 : end + 1], experts[:, end + 1]
    chosen = following >= 0
    if not chosen.any():
        raise InputError(f"no token of the profile chose an expert in layer {end + 1}, so nothing can be predicted there")
    whole = chosen & (path >= 0).all(axis=1)
    paths = _Paths(path[whole], num_experts)
    # The overall distribution is one more path, that every token took.
    number = np.concatenate([paths.number, np.full(chosen.sum(), paths.count)])
    pair, tokens = np.unique(number * num_experts + np.concatenate([following[whole], following[chosen]]), return_counts=True)
    number, expert = np.divmod(pair, num_experts)
    order = np.lexsort((expert, -tokens, number))
    number, expert, tokens = number[order], expert[order], tokens[order]
    first = np.searchsorted(number, np.arange(paths.count + 2))
    return LayerProfile(paths, first, expert, tokens / np.bincount(number, tokens)[number])


class _Paths:
    """The different paths of a recording, numbered from 0 in the order of their ids.

    A path is read as a number with its experts as digits. Where one more digit might overflow, the numbers met so far
    are replaced by their ranks, so paths may have any length.
    """

    def __init__(self, paths: Ints, num_experts: int) -> None:
        """paths: int64[token, path], ids that exist. `number`: int64[token]; `count`: how many differ."""
        self.num_experts = num_experts
        self.ranks: dict[int, Ints] = {}
        code, most = np.zeros(len(paths), dtype=np.int64), 1
        for place, digit in enumerate(paths.T):
            if most > CODE_LIMIT // num_experts:
                self.ranks[place], code = np.unique(code, return_inverse=True)
                most = max(len(paths), 1)
            code = code * num_experts + digit
            most *= num_experts
        self.codes, self.number = np.unique(code, return_inverse=True)

    @property
    def count(self) -> int:
        return len(self.codes)

    def find(self, paths: Ints) -> Ints:
        """int64[token]: the numbers of paths int64[token, path]; `count` for one that is not here."""
        code = np.zeros(len(paths), dtype=np.int64)
        for place, digit in enumerate(paths.T):
            if place in self.ranks:
                code = _rank(code, self.ranks[place])
            code = np.where((code < 0) | (digit < 0), -1, code * self.num_experts + digit)
        rank = _rank(code, self.codes)
        return np.where(rank < 0, self.count, rank)


def _rank(code: Ints, sorted_codes: Ints) -> Ints:
    """int64[token]: the place of each code in `sorted_codes`, -1 if it is not there."""
    if not len(sorted_codes):
        return np.full(len(code), -1)
    place = np.minimum(np.searchsorted(sorted_codes, code), len(sorted_codes) - 1)
    return np.where(sorted_codes[place] == code, place, -1)


def _ids(experts: Ints, num_experts: int, name: str) -> Ints:
    """int64[token, layer] of expert ids; raises InputError for another shape and for ids that do not exist."""
    experts = np.asarray(experts)
    if experts.ndim != 2 or not experts.shape[1] or (experts.size and experts.dtype.kind not in "iu"):
        raise InputError(f"{name}: wanted a table of whole numbers [token, layer], not shape {list(experts.shape)}")
    experts = experts.astype(np.int64)
    if num_experts < 1:
        raise InputError(f"{num_experts} experts; wanted at least 1")
    if experts.size and not -1 <= experts.min() <= experts.max() < num_experts:
        wrong = experts.max() if experts.max() >= num_experts else experts.min()
        raise InputError(f"{name}: there is no expert {wrong}; ids go from 0 to {num_experts - 1}, -1 is no choice")
    return experts
