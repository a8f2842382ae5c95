"""Experts by the fused kernels that serving engines run, from the measured tables of aiconfigurator-core.

Its `moe_perf` tables have the kernels that SGLang chooses (Triton's, FlashInfer's, Marlin's) for many sizes of models; the
`wideep_*_moe_perf` ones the grouped GEMMs that follow DeepEP, for DeepSeek-V3's sizes. A row is the time of one GPU of an
expert-parallel group for its experts, routing weights and activation included; `num_tokens` counts the tokens of all GPUs. Its
loads are not kept, but drawn again here by the rules of aiconfigurator's collector (`collector/helper.py` of its repository).
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression, nnls
from scipy.special import pdtrc

from engine.cluster import Gpu
from engine.costs.base import CostModel, Derived
from engine.costs.silicon import MILLISECONDS, folder_of, installed_package, newest
from engine.errors import InputError
from engine.model import MoEModel
from engine.workload import digest_of

Phase = Literal["prefill", "decode"]

DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8_block"}
FEWER_BITS = {"bf16": {4.25: ("w4a16_mxfp4", "int4_wo")}, "fp8": {4.25: ("w4a8_mxfp4_mxfp8",), 4.5: ("nvfp4",)}}
"""The tables' formats of weights with fewer bits than the activations, by bits a weight with its scales (MXFP4 has 4.25, NVFP4
4.5); weights of 4 to 5 bits with 16-bit activations are integers otherwise."""
WIDE_TABLES: dict[Phase, str] = {"prefill": "wideep_context_moe_perf.parquet", "decode": "wideep_generation_moe_perf.parquet"}
POWER_LAW = "power_law_"
"""The beginning of a skewed distribution's name; its exponent follows. The others are `balanced` and `uniform`."""
SIZES = ("hidden_size", "inter_size", "topk", "num_experts")

TILES = (16, 64, 128)
"""Rows of the tiles into which kernels cut an expert's tokens; which of them a kernel takes, the fit finds."""
DRAWS = 8
"""Draws of a power law for one row; the collector averages five."""
FEWEST_ROWS = 8
"""Rows of GPUs with as many experts from which on they are fitted."""


@dataclass(frozen=True)
class FusedExperts(Derived):
    """Another source with its experts replaced by measured fused kernels, the experts of a GPU priced as a whole, see
    `KernelTable`. Loads are taken as expected ones, around which a step's own tokens scatter as Poisson's distribution has it.

    slots: experts of a layer that a GPU holds
    """

    rest: CostModel
    phase: Phase
    slots: float

    @property
    def computation(self) -> CostModel:
        return self.rest

    connection = computation

    @property
    def digest(self) -> str:
        return digest_of(self.rest.digest, self.phase, str(self.slots), installed_package())

    @property
    def source(self) -> str:
        return f"experts: fused kernels of SGLang ({self.phase}), measured, {installed_package()}; else {self.rest.source}"

    def expert_ffn(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        """As in `CostModel`: the share of one expert where all that the GPU holds have as many tokens."""
        work = self.slots * work_of_experts(np.asarray(tokens, dtype=np.float64), expected=True)
        return self._seconds(gpu, work, model) / self.slots

    def ffn_of_gpus(
        self, gpu: Gpu, tokens: np.ndarray, place: tuple[np.ndarray, ...], shape: tuple[int, ...], model: MoEModel
    ) -> np.ndarray:
        work = work_of_experts(tokens, expected=True)
        summed = np.zeros((*shape, work.shape[-1]))
        np.add.at(summed, place, work)
        return self._seconds(gpu, summed, model)

    def _seconds(self, gpu: Gpu, work: np.ndarray, model: MoEModel) -> np.ndarray:
        if (table := kernel_table(gpu.type, model, self.phase)) is None:
            raise InputError(f"there are no measured fused kernels for {model.name} in {model.dtype} on {gpu.type}")
        share, foreign = min(self.slots / model.experts, 1.0), 0.0
        if table.whole_tokens:  # a token comes if any of its choices is here, with the others masked
            foreign = ((1 - (1 - share) ** model.experts_per_token) / share - 1) * work[..., 1]
        return table.seconds(work, self.slots, foreign)


def work_of_experts(tokens: np.ndarray, expected: bool = False) -> np.ndarray:
    """float64[..., term]: the work of experts, which adds up: 1 for one with tokens, its tokens, and its tiles of every height.

    tokens: float64[...], of each expert
    expected: they are means of Poisson's distribution, so that 0.5 of a token touches an expert in 39 % of the steps
    """
    touched = -np.expm1(-tokens) if expected else (tokens > 0).astype(np.float64)
    tiles = [_mean_tiles(tokens, rows) if expected else np.ceil(tokens / rows) for rows in TILES]
    return np.stack([touched, tokens, *tiles], axis=-1)


def _mean_tiles(tokens: np.ndarray, rows: int) -> np.ndarray:
    grid, tiles = _poisson_tiles(rows)
    return np.interp(tokens, grid, tiles) + np.maximum(tokens - grid[-1], 0.0) / rows


@lru_cache
def _poisson_tiles(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean numbers of tokens, and mean tiles of so many rows for them."""
    grid = np.append(0.0, np.geomspace(1e-3, 64 * rows, 800))
    return grid, pdtrc(np.arange(96)[:, None] * rows, grid).sum(axis=0)


@dataclass(frozen=True, eq=False)
class Fit:
    """The kernels of GPUs that hold so many experts.

    A GPU's effort is a sum of parts, none negative: a launch, weights of experts with tokens, tokens, tiles, and copies for
    experts of other GPUs, which a table's run sorts and skips, or even computes, of all tokens of the group. A dispatch brings
    a GPU few of these or none. Seconds follow the effort along the measured rows, interpolated linearly in the
    logarithms of both, and never fall.

    experts: that the GPU holds
    launch: seconds
    each: float64[term], seconds of each term of `work_of_experts`
    foreign: seconds of a copy for another GPU's expert
    effort, seconds: float64[row], ascending
    """

    experts: float
    launch: float
    each: np.ndarray
    foreign: float
    effort: np.ndarray
    seconds: np.ndarray

    def of(self, work: np.ndarray, foreign: np.ndarray | float = 0.0) -> np.ndarray:
        """float64[...] seconds of the work of all experts of a GPU (float64[..., term]); beyond the measured rows in proportion
        to its effort. foreign: float64[...] copies for experts of other GPUs"""
        effort = self.launch + work @ self.each + self.foreign * foreign
        inside = np.clip(effort, self.effort[0], self.effort[-1])
        seconds = np.exp(np.interp(np.log(inside), np.log(self.effort), np.log(self.seconds)))
        return seconds * np.maximum(effort / self.effort[-1], 1.0)


@dataclass(frozen=True, eq=False)
class KernelTable:
    """The kernels of one model's sizes on one GPU, for the numbers of experts that GPUs held in the measurements, ascending.

    Fitted to rows of even and of power-law loads; those that `kernel_rows` holds out are met to 5 % on average, as closely as
    two draws of the same law meet each other (docs/serving.md).

    whole_tokens: a GPU gets rows of tokens that have a choice there, as DeepEP's normal dispatch brings them, not of choices
    """

    fits: tuple[Fit, ...]
    whole_tokens: bool = False

    def seconds(self, work: np.ndarray, slots: float, foreign: np.ndarray | float = 0.0) -> np.ndarray:
        """float64[...]: seconds of a GPU for all its experts; 0 without a token.

        work: float64[..., term], see `work_of_experts`, summed up over its experts
        slots: that the GPU holds; between measured numbers interpolated in logarithms, and beyond them as the nearest
        foreign: see `Fit.of`
        """
        held = np.log([fit.experts for fit in self.fits])
        place = np.interp(np.log(max(slots, 1e-9)), held, np.arange(len(held)))
        low, high = self.fits[int(np.floor(place))], self.fits[int(np.ceil(place))]
        part = place - np.floor(place)
        seconds = low.of(work, foreign) ** (1 - part) * high.of(work, foreign) ** part
        return np.where(work[..., 0] > 0, seconds, 0.0)

    def least(self, tokens: np.ndarray) -> np.ndarray:
        """float64[...]: seconds that an expert with `tokens` (float64[...], expected) adds at least, whatever else a GPU holds:
        no set of experts takes less than the sum of theirs."""
        work = work_of_experts(tokens, expected=True)
        return np.min([(fit.seconds / fit.effort).min() * (work @ fit.each) for fit in self.fits], axis=0)


@lru_cache
def kernel_table(gpu_type: str, model: MoEModel, phase: Phase) -> KernelTable | None:
    """The kernels for a model on a GPU type: those of wide expert parallelism where they were measured, else the usual ones;
    None where neither was. Raises InputError when the package is absent."""
    rows = kernel_rows(gpu_type, model, phase)
    if rows.empty:
        return None
    parts = rows[~rows.held_out].groupby("experts_held")
    fits = (_fitted(float(held), part) for held, part in parts if len(part) >= FEWEST_ROWS)
    return KernelTable(tuple(fits), bool(rows.whole_tokens.all()))


def _fitted(experts: float, rows: pd.DataFrame) -> Fit:
    """Least squares of relative errors with coefficients that are not negative, then a line of seconds that never falls."""
    seconds = rows.seconds.to_numpy(np.float64)
    columns = np.column_stack([np.ones(len(rows)), np.stack(rows.work), rows.foreign])
    scale = np.abs(columns / seconds[:, None]).max(axis=0).clip(min=1e-300)
    parts = nnls(columns / seconds[:, None] / scale, np.ones(len(rows)))[0] / scale
    effort = columns @ parts
    order = np.argsort(effort, kind="stable")
    rising = np.exp(isotonic_regression(np.log(seconds[order])).x)
    return Fit(experts, parts[0], parts[1:-1], parts[-1], effort[order], rising)


def _formats_of(model: MoEModel) -> tuple[str, ...]:
    """The tables' formats that a model's experts may have."""
    if model.expert_bits is None:
        return tuple(filter(None, (DTYPES.get(model.dtype),)))
    whole = "int4_wo" if DTYPES.get(model.dtype) == "bfloat16" and 4 <= model.expert_bits < 5 else None
    return FEWER_BITS.get(model.dtype, {}).get(model.expert_bits, tuple(filter(None, (whole,))))


def kernel_rows(gpu_type: str, model: MoEModel, phase: Phase) -> pd.DataFrame:
    """The rows of `kernel_table`'s source: columns `distribution`, `experts_held`, `all_tokens`, `seconds`, `work` (of the GPU:
    float64[term], mean of the draws), `foreign` (copies for experts of other GPUs, which the collector gave the kernel too),
    `held_out`, and `whole_tokens` of `KernelTable`.

    Half of the power-law rows are held out of the fit: those whose setting has an odd SHA-256. After DeepEP's normal dispatch,
    uniform rows with fewer tokens than a tile for each expert are left out: their buffers are not padded as DeepEP pads them,
    which makes them up to five times as fast as uneven ones of as many tokens.
    """
    keys = ["distribution", "experts_held", "all_tokens"]
    none = pd.DataFrame(columns=[*keys, "seconds", "work", "foreign", "held_out", "whole_tokens"])
    installed_package()
    folder = folder_of(gpu_type)
    if folder is None or model.ffn_matrices != 3:
        return none
    wanted = dict(zip(SIZES, (model.row_width, model.d_ff, model.experts_per_token, model.experts), strict=True))
    for name in (WIDE_TABLES[phase], "moe_perf.parquet"):
        for file in newest(folder, "moe/sglang", name):
            filters = [(key, "=", value) for key, value in wanted.items()]
            rows = pd.read_parquet(file, filters=[*filters, ("moe_tp_size", "=", 1)])
            format = next((format for format in _formats_of(model) if (rows.moe_dtype == format).any()), None)
            if format is None:
                continue
            rows = rows[(rows.moe_dtype == format) & (model.experts % rows.moe_ep_size == 0)]
            rows = rows.assign(experts_held=model.experts // rows.moe_ep_size, all_tokens=rows.num_tokens)
            rows = (rows.groupby(keys).latency.median() * MILLISECONDS).rename("seconds").reset_index()
            padded, wide = name == WIDE_TABLES["prefill"], name in WIDE_TABLES.values()
            if padded:
                full = rows.all_tokens * model.experts_per_token >= max(TILES) * model.experts
                rows = rows[full | rows.distribution.str.startswith(POWER_LAW)]
            sizes = model.experts, model.experts_per_token
            work = [_work_of_row(*sizes, row.all_tokens, row.experts_held, row.distribution) for row in rows.itertuples()]
            setting = f"{folder} {format} {list(wanted.values())}"
            settings = [f"{setting} {row.experts_held} {row.all_tokens} {row.distribution}" for row in rows.itertuples()]
            odd = np.array([hashlib.sha256(each.encode()).digest()[-1] % 2 == 1 for each in settings], dtype=bool)
            # DeepEP's low-latency kernels are given an expert's rows alone.
            foreign = [0.0 if wide and not padded else row.all_tokens * sizes[1] for row in rows.itertuples()]
            foreign = [max(copies - each[1], 0.0) for copies, each in zip(foreign, work, strict=True)]
            held_out = odd & rows.distribution.str.startswith(POWER_LAW).to_numpy(bool)
            return rows.assign(work=work, foreign=foreign, held_out=held_out, whole_tokens=padded)
    return none


@lru_cache(maxsize=8192)
def _work_of_row(experts: int, k: int, tokens: int, held: int, distribution: str) -> np.ndarray:
    """float64[term]: the work of the GPU that a row was measured on, the mean over the draws of a power law. The same for all
    GPU types."""
    if distribution.startswith(POWER_LAW):
        loads = busiest_gpu(experts, k, tokens, held, float(distribution.removeprefix(POWER_LAW)))
    elif distribution == "uniform":
        each = tokens * k // experts
        few = np.arange(held) < tokens * held // experts * k
        loads = np.full(held, each) if each else few.astype(np.int64)
    else:  # every k-th expert from one on, the next token's from the next one on; few tokens are spread
        stride = -(-experts // k)
        first = np.arange(tokens)[:, None] * max(stride / tokens, 1.0)
        loads = np.bincount(((first + np.arange(k) * stride) % experts).astype(np.int64).ravel(), minlength=experts)[:held]
    work = work_of_experts(np.atleast_2d(loads).astype(np.float64)).sum(axis=1).mean(axis=0)
    work.flags.writeable = False
    return work


def busiest_gpu(experts: int, k: int, tokens: int, held: int, exponent: float) -> np.ndarray:
    """int64[draw, held]: token copies of the experts of the GPU that has most, as aiconfigurator's collector draws them.

    Popularity follows x^-exponent between 1 and 0.8 · tokens, for few tokens between 0.01 and 2. Shares are rounded, no expert
    has more copies than there are tokens, and GPU after GPU gives its fullest expert's, or gets for its emptiest, until the
    copies are tokens · k.
    """
    low, high = (1.0, 0.8 * tokens) if tokens * k > experts else (0.01, 2.0)
    power, rng = 1 - exponent, np.random.default_rng(0)
    drawn = ((high**power - low**power) * rng.random((DRAWS, experts)) + low**power) ** (1 / power)
    copies = np.round(drawn / drawn.sum(axis=1, keepdims=True) * tokens * k).astype(np.int64).clip(max=tokens)
    groups, draw, gpus = copies.reshape(DRAWS, -1, held), np.arange(DRAWS)[:, None], np.arange(experts // held)
    while (missing := tokens * k - groups.sum(axis=(1, 2))[:, None]).any():
        step = (np.abs(missing) // (4 * experts)).clip(min=1)  # one by one, or a quarter of an expert's part at once
        place = np.where(missing > 0, groups.argmin(axis=2), groups.argmax(axis=2))
        there = groups[draw, gpus, place]
        able = np.where(missing > 0, there + step <= tokens, there >= step) & (missing != 0)
        turn = able & (np.cumsum(able, axis=1) * step <= np.abs(missing))
        groups[draw, gpus, place] += np.sign(missing) * step * turn
    return groups[draw[:, 0], groups.sum(axis=2).argmax(axis=1)]
