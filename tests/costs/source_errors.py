"""Errors of the cost sources against real GPUs, and so against each other.

The measured tables of `silicon` are the truth. Sources learn from every second size and are held against the sizes between.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from engine.catalogue import gpu, node_types
from engine.cluster import Cluster, Gpu, Node
from engine.costs import silicon
from engine.costs.alpha_beta import AlphaBeta, fit_line
from engine.costs.base import CostModel, Datasheet
from engine.costs.gemm_table import Curve, GemmTable
from engine.costs.measured import GemmTimes, MeasuredTimes, fit_profile
from engine.costs.profiled import Profiled
from engine.model import MoEModel

GATED = (2, 8)
"""Experts per token of the MoE layers compared: families with three matrices an expert."""

COLUMNS = ["gpu", "operation", "source", "mean", "worst", "points"]


def cross_errors(gpus: Iterable[str] = ("H100", "H200"), dtype: str = "bf16") -> pd.DataFrame:
    """Relative errors |predicted / measured - 1|: columns gpu, operation ("GEMM", "MoE FFN", "all-to-all", "all-reduce"),
    source ("α–β", "profiled", "silicon", "datasheet"), mean, worst, points. Raises InputError when nothing was measured.

    GEMM: the grid without the points of three learned sizes; all-to-all and all-reduce: NCCL on all measured
    numbers of GPUs of a node. In both `silicon` interpolates as `profiled` does and has no row of its own. MoE FFN: whole
    MoE layers of equally loaded experts in SGLang's fused kernels, against the GEMMs of their experts one after another, of
    which `silicon` learned all and the others a part as before. That is no like for like: fused kernels save launches on
    few rows, and on many rows of wide layers SGLang's were measured at a third of the plain GEMMs' rate.
    """
    rows = []
    for kind in gpus:
        table, card = silicon.gemm_table(silicon.MACHINES[kind].folder, silicon.GEMM_DTYPES[dtype]), gpu(kind)
        learned = Profiled(MeasuredTimes(name="every second size", origin=kind, gemm=(_half_of(table, kind, dtype),)))
        sources = {"α–β": AlphaBeta(fit_profile(learned.measured, dtype)), "profiled": learned, "datasheet": Datasheet()}
        found = {"GEMM": _gemm_errors(table, card, dtype, sources)}
        found["MoE FFN"] = _moe_errors(card, dtype, sources | {"silicon": silicon.Silicon()})
        found |= {operation.replace("_", "-"): _collective_errors(kind, operation) for operation in silicon.NCCL_OPERATIONS}
        for operation, errors in found.items():
            rows += [[kind, operation, name, *_summary(relative)] for name, relative in errors.items()]
    return pd.DataFrame(rows, columns=COLUMNS)


def left_out_errors(table: GemmTable) -> np.ndarray:
    """float64[axis]: mean relative error when each size of m, of n and of k inside the grid is in turn left out and
    interpolated from its two neighbours."""
    mean_errors = []
    for axis, sizes in enumerate((table.m, table.n, table.k)):
        log_seconds, place = np.moveaxis(np.log(table.seconds), axis, 0), np.log(sizes)
        share = ((place[1:-1] - place[:-2]) / (place[2:] - place[:-2])).reshape(-1, 1, 1)
        between = (1 - share) * log_seconds[:-2] + share * log_seconds[2:]
        mean_errors.append(np.abs(np.exp(between - log_seconds[1:-1]) - 1).mean())
    return np.array(mean_errors)


def _summary(errors: np.ndarray) -> tuple[float, float, int]:
    return float(errors.mean()), float(errors.max()), errors.size


def _half_of(table: GemmTable, kind: str, dtype: str) -> GemmTimes:
    """The GEMMs with all three sizes at even places of the grid."""
    half = np.meshgrid(table.m[::2], table.n[::2], table.k[::2], indexing="ij")
    columns = [*(axis.ravel() for axis in half), table.seconds[::2, ::2, ::2].ravel()]
    return GemmTimes(gpu=kind, dtype=dtype, points=tuple(np.column_stack(columns).tolist()))


def _gemm_errors(table: GemmTable, card: Gpu, dtype: str, sources: dict[str, CostModel]) -> dict[str, np.ndarray]:
    """Only inside the learned range: an end of the grid at an odd place would be extrapolation."""
    inside = tuple(len(sizes) - 1 + len(sizes) % 2 for sizes in (table.m, table.n, table.k))
    rest = np.ones(inside, dtype=bool)
    rest[::2, ::2, ::2] = False
    errors = {}
    for name, cost in sources.items():
        predicted = np.empty(inside)
        for at, n in enumerate(table.n[: inside[1]]):
            for place, k in enumerate(table.k[: inside[2]]):
                predicted[:, at, place] = cost.gemm(card, table.m[: inside[0]], int(n), int(k), dtype)
        measured = table.seconds[: inside[0], : inside[1], : inside[2]]
        errors[name] = np.abs(predicted / measured - 1)[rest]
    return errors


def _moe_table(folder: str, dtype: str) -> pd.DataFrame:
    """Whole MoE layers on one GPU with equally loaded experts, as SGLang's fused kernels run them: columns tokens, d_model,
    d_ff, experts_per_token, experts, seconds. Empty where the dtype was not measured. Raises InputError as `gemm_table`."""
    measured = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
    names = dict(zip(measured, ("tokens", "d_model", "d_ff", "experts_per_token", "experts"), strict=True))
    for file in silicon.newest(folder, "moe/sglang", "moe_perf.parquet"):
        rows = pd.read_parquet(file)
        alone = (rows.moe_tp_size == 1) & (rows.moe_ep_size == 1) & (rows.distribution == "balanced")
        rows = rows[alone & (rows.moe_dtype == dtype)].rename(columns=names)
        if not rows.empty:
            return (rows.groupby([*names.values()]).latency.median() * silicon.MILLISECONDS).rename("seconds").reset_index()
    return pd.DataFrame(columns=[*names.values(), "seconds"])


def _moe_errors(card: Gpu, dtype: str, sources: dict[str, CostModel]) -> dict[str, np.ndarray]:
    rows = _moe_table(silicon.MACHINES[card.type].folder, silicon.GEMM_DTYPES[dtype])
    rows = rows[rows.experts_per_token.isin(GATED)]
    errors: dict[str, list[np.ndarray]] = {name: [] for name in sources}
    columns = ["d_model", "d_ff", "experts_per_token", "experts"]
    for key, part in rows.groupby(columns):
        sizes = dict(zip(columns, map(int, key), strict=True))
        model = MoEModel(name="layer", layers=1, **sizes, dtype=dtype, batch=1, ffn_matrices=3)
        copies = part.tokens.to_numpy(np.float64) * model.experts_per_token
        busy = np.minimum(copies, model.experts)
        for name, cost in sources.items():
            predicted = busy * cost.expert_ffn(card, copies / busy, model)
            errors[name].append(np.abs(predicted / part.seconds.to_numpy() - 1))
    return {name: np.concatenate(parts) for name, parts in errors.items()}


def _collective_errors(kind: str, operation: str) -> dict[str, np.ndarray]:
    errors: dict[str, list[np.ndarray]] = {"α–β": [], "profiled": [], "datasheet": []}
    machine = silicon.MACHINES[kind]
    for count in silicon.measured_counts(machine.folder):
        sizes, seconds = silicon.collective_table(machine.folder, operation, count)
        learned = sizes[::2], seconds[::2]
        between = slice(1, len(sizes) - 1 + len(sizes) % 2, 2)
        sizes, seconds = sizes[between], seconds[between]
        cluster = _one_node(kind, count, machine.link_bandwidth)
        predicted = {
            "α–β": fit_line(*learned).seconds(sizes),
            "profiled": Curve.through(zip(*learned, strict=True)).at(sizes, operation),
            "datasheet": getattr(Datasheet(), operation)(cluster, sizes),
        }
        for name, predicted_seconds in predicted.items():
            errors[name].append(np.abs(predicted_seconds / seconds - 1))
    return {name: np.concatenate(parts) for name, parts in errors.items()}


def _one_node(kind: str, count: int, link_bandwidth: float) -> Cluster:
    """GPUs of a type on links as the catalogue draws them."""
    latency = next(node.link_latency for node in node_types().values() if node.gpu == kind)
    node = Node(name="node", gpus=(gpu(kind),) * count, link_bandwidth=link_bandwidth, link_latency=latency)
    return Cluster(name=f"{count} {kind}", nodes=(node,))
