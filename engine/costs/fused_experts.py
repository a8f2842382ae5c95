"""Experts by the fused kernels that serving engines run, from the measured tables of aiconfigurator-core.

Its `moe_perf` tables have SGLang's Triton kernel for many sizes of models; the `wideep_*_moe_perf` ones the grouped GEMMs that
follow DeepEP, for DeepSeek-V3's sizes. A row is the time of one GPU of an expert-parallel group for its experts, routing
weights and activation included; `num_tokens` counts the tokens of all GPUs, so that in a balanced row each expert gets
num_tokens · topk / num_experts of them.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd

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
BALANCED = ("balanced", "uniform")
SIZES = ("hidden_size", "inter_size", "topk", "num_experts")


@dataclass(frozen=True)
class FusedExperts(Derived):
    """Another source with its experts replaced by measured fused kernels.

    An expert takes its share of a balanced row in which a GPU holds as many experts and each has as many tokens, interpolated
    linearly in the logarithms of both. Experts add up, so an uneven load takes the sum of its parts. Fewer tokens than measured
    take as long as the fewest (the weights are read all the same), more go on at the last throughput.

    The tables' rows of power-law loads check that: for GPUs that hold 4 to 32 experts of DeepSeek-V3 they are met to 13 % (an
    exponent of 0.6) to 24 % (1.2) on average, and no more than 8 % off to one side (`tests.benchmarks.bench_serving`). Each was
    measured on one draw of the law, which is not kept, so a part of that is the draw's.

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
        if (table := kernel_table(gpu.type, model, self.phase)) is None:
            raise InputError(f"there are no measured fused kernels for {model.name} in {model.dtype} on {gpu.type}")
        return table.seconds(tokens, self.slots)


@dataclass(frozen=True, eq=False)
class KernelTable:
    """Balanced rows of one model's sizes on one GPU. A row's last points may repeat.

    experts: float64[row], experts a GPU holds
    tokens: float64[row, point], of each expert
    share: float64[row, point], seconds for each expert
    """

    experts: np.ndarray
    tokens: tuple[np.ndarray, ...]
    share: tuple[np.ndarray, ...]

    def seconds(self, tokens: np.ndarray, slots: float) -> np.ndarray:
        """float64[...]: seconds that one expert with `tokens` (float64[...]) adds on a GPU with `slots` experts."""
        tokens = np.asarray(tokens, dtype=np.float64)
        place = np.interp(np.log(max(slots, 1e-9)), np.log(self.experts), np.arange(len(self.experts)))
        low, high = int(np.floor(place)), int(np.ceil(place))
        below, above = self._row(low, tokens), self._row(high, tokens)
        seconds = np.exp(np.log(below) * (1 - (place - low)) + np.log(above) * (place - low))
        return np.where(tokens > 0, seconds, 0.0)

    def _row(self, row: int, tokens: np.ndarray) -> np.ndarray:
        measured, share = self.tokens[row], self.share[row]
        inside = np.clip(tokens, measured[0], measured[-1])
        seconds = np.exp(np.interp(np.log(inside), np.log(measured), np.log(share)))
        return seconds * np.maximum(tokens / measured[-1], 1.0)


@lru_cache
def kernel_table(gpu_type: str, model: MoEModel, phase: Phase) -> KernelTable | None:
    """The kernels for a model on a GPU type: those of wide expert parallelism where they were measured, else the usual ones;
    None where neither was. Raises InputError when the package is absent."""
    rows = kernel_rows(gpu_type, model, phase)
    rows = rows[rows.distribution.isin(BALANCED)]
    if rows.empty:
        return None
    experts, tokens, share = [], [], []
    for held, part in rows.groupby("experts_held"):
        part = part.sort_values("tokens")
        seconds = np.maximum.accumulate(part.seconds.to_numpy(np.float64))  # noise aside, more tokens never take less
        experts.append(float(held))
        tokens.append(part.tokens.to_numpy(np.float64))
        share.append(seconds / held)
    return KernelTable(np.array(experts), tuple(tokens), tuple(share))


def _formats_of(model: MoEModel) -> tuple[str, ...]:
    """The tables' formats that a model's experts may have."""
    if model.expert_bits is None:
        return tuple(filter(None, (DTYPES.get(model.dtype),)))
    whole = "int4_wo" if DTYPES.get(model.dtype) == "bfloat16" and 4 <= model.expert_bits < 5 else None
    return FEWER_BITS.get(model.dtype, {}).get(model.expert_bits, tuple(filter(None, (whole,))))


def kernel_rows(gpu_type: str, model: MoEModel, phase: Phase) -> pd.DataFrame:
    """All rows of `kernel_table`'s source, skewed ones too: columns `distribution`, `experts_held`, `all_tokens`, `tokens` (of
    an expert, on average) and `seconds`."""
    columns = ["distribution", "experts_held", "all_tokens", "tokens", "seconds"]
    installed_package()
    folder = folder_of(gpu_type)
    if folder is None or model.ffn_matrices != 3:
        return pd.DataFrame(columns=columns)
    wanted = dict(zip(SIZES, (model.row_width, model.d_ff, model.experts_per_token, model.experts), strict=True))
    for name in (WIDE_TABLES[phase], "moe_perf.parquet"):
        for file in newest(folder, "moe/sglang", name):
            filters = [(key, "=", value) for key, value in wanted.items()]
            rows = pd.read_parquet(file, filters=[*filters, ("moe_tp_size", "=", 1)])
            format = next((format for format in _formats_of(model) if (rows.moe_dtype == format).any()), None)
            if format is None:
                continue
            rows = rows[rows.moe_dtype == format]
            rows = rows.assign(
                experts_held=model.experts // rows.moe_ep_size,
                all_tokens=rows.num_tokens,
                tokens=rows.num_tokens * model.experts_per_token / model.experts,
            )
            keys = columns[:-1]
            return (rows.groupby(keys).latency.median() * MILLISECONDS).rename("seconds").reset_index()
    return pd.DataFrame(columns=columns)
