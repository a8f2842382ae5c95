"""Collectives inside a scale-up domain (NCCL's, and the all-to-alls of TensorRT-LLM over NVLink), and fused experts' loads."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from engine.catalogue import gpu
from engine.cluster import Cluster, Node
from engine.communication.travel import Stops, rows_of_tokens
from engine.compare.trust.prediction import Prediction
from engine.costs import CollectiveTimes, MeasuredTimes, Profiled, fit_line
from engine.costs.deepep import EXPERTS, benchmark_experts, benchmark_model
from engine.costs.fused_experts import POWER_LAW, kernel_rows, kernel_table
from engine.costs.silicon import MACHINES, NCCL_OPERATIONS, collective_table, measured_counts, nvlink_table
from engine.model import MoEModel
from engine.plan import Travel

NCCL_GPUS = ("H100", "H200", "B200")
NVLINK_MACHINE = "gb200"
TRAVEL = Travel(unit="gpu", combine="bf16")


def nccl() -> Iterator[Prediction]:
    """All-to-alls and all-reduces on 2 to 8 GPUs of a node: interpolated between every second size, and by a datasheet."""
    for kind in NCCL_GPUS:
        machine = MACHINES[kind]
        for operation in NCCL_OPERATIONS:
            for gpus in measured_counts(machine.folder):
                table = collective_table(machine.folder, operation, gpus)
                if table is None:
                    continue
                node = Node(name="node", gpus=(gpu(kind),) * gpus, link_bandwidth=machine.link_bandwidth)
                cluster = Cluster(name=kind, nodes=(node,))
                points = tuple(zip(table[0][::2].tolist(), table[1][::2].tolist(), strict=True))
                learned = CollectiveTimes(operation=operation, ranks=gpus, points=points)
                source = Profiled(MeasuredTimes(name="every second size", origin=kind, collectives=(learned,)))
                answers = getattr(source, operation)(cluster, table[0])
                for place, (size, measured) in enumerate(zip(*table, strict=True)):
                    yield Prediction(
                        f"NCCL {operation.replace('_', '-')}",
                        kind,
                        1,
                        f"{gpus} GPUs, {size:,.0f} bytes each",
                        float(measured),
                        float(answers[place]),
                        place % 2 == 0,
                    )


def nvlink_exchanges() -> Iterator[Prediction]:
    """Dispatch and combine over NVLink: one row per GPU, by a start-up and a rate that are fitted to every second number of
    tokens, for every number of GPUs that meet."""
    row_bytes = dict(zip(("dispatch", "combine"), TRAVEL.row_bytes(benchmark_model()), strict=True))
    for (kind, ranks), table in nvlink_table(NVLINK_MACHINE).groupby(["kind", "ranks"]):
        hosts = benchmark_experts(1, "copies") // (EXPERTS // ranks)
        rows = rows_of_tokens(hosts, np.zeros(len(hosts)), Stops(np.zeros(ranks, dtype=np.int64)), "gpu")
        size = table.tokens.to_numpy() * float(rows[0, 1:].sum() / len(hosts)) * row_bytes[kind]
        seconds = table.seconds.to_numpy()
        predicted = fit_line(size[::2], seconds[::2]).seconds(size)
        for place, tokens in enumerate(table.tokens):
            yield Prediction(
                f"TensorRT-LLM {kind} over NVLink",
                "GB200",
                1,
                f"{ranks} GPUs, {tokens:,} tokens each",
                float(seconds[place]),
                float(predicted[place]),
                place % 2 == 0,
            )


def skew_errors(gpu_type: str, model: MoEModel, phase: str) -> pd.DataFrame:
    """Every power-law row of a model and its price: columns exponent, held, tokens, measured and ours (seconds), held_out of
    the fit, error (relative). Loads are the mean of some draws of the row's law."""
    table, rows = kernel_table(gpu_type, model, phase), kernel_rows(gpu_type, model, phase)
    errors = []
    for row in rows[rows.distribution.str.startswith(POWER_LAW)].itertuples():
        exponent = float(row.distribution.removeprefix(POWER_LAW))
        ours = float(table.seconds(row.work, row.experts_held, row.foreign))
        error = ours / row.seconds - 1
        errors.append((exponent, row.experts_held, row.all_tokens, row.seconds, ours, row.held_out, error))
    return pd.DataFrame(errors, columns=["exponent", "held", "tokens", "measured", "ours", "held_out", "error"])
