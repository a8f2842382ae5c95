"""The time and memory of every reader of recordings: `python -m tests.benchmarks.bench_formats [ROWS [NAME …]]`.

ROWS, 1,000,000 unless said, are layers of tokens, each with its eight choices; of counts, layers of steps. A format is given
fewer where more would not be read, as the files would be too large. NAME picks the formats with it in their names. Files are
read in a process of its own that begins with nothing loaded but the readers; libraries that one of them loads are its own.
CPU seconds are of all threads, and tell more than seconds on a machine with other work.

Recordings are written with the bare libraries: choices are those of a model with 50 MoE layers of 256 experts, top-8, in
requests of a thousand tokens; counts are of such a model's layers, step after step.
"""

import base64
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from engine.formats import check_recording, read_workload
from engine.model import MoEModel
from engine.units import seconds, size
from engine.workload import RoutingTrace
from tests.benchmarks.shared import columns, in_child
from tests.cases.vllm import answer

LAYERS, K, EXPERTS = 50, 8, 256
REQUEST = 1000
"""Tokens of a request, a pass or a batch."""
ANSWERS_A_FILE = 50
"""Fewer tokens than make a file of lists too large."""
MODEL = MoEModel(name="of the size", layers=LAYERS, experts=EXPERTS, experts_per_token=K, d_model=2048, d_ff=512)
USAGE = {"prompt_tokens": REQUEST - 99, "completion_tokens": 100}
COMPACT = (",", ":")


@dataclass(frozen=True)
class Recording:
    """write: into an empty folder, so many rows, a row being a layer of a token or of a step; most: rows that fit into a
    file that may be read; options: of `read_workload`"""

    name: str
    write: Callable[[Path, int], None]
    most: int = 5_000_000
    options: dict = field(default_factory=dict)


def choices(rows: int) -> np.ndarray:
    """int16[token, layer, k], whole requests."""
    tokens = max(rows // LAYERS // REQUEST, 1) * REQUEST
    first = np.random.default_rng(0).integers(EXPERTS, size=(tokens, LAYERS, 1))
    return ((first + 37 * np.arange(K)) % EXPERTS).astype(np.int16)


def requests(rows: int) -> Iterator[np.ndarray]:
    """int16[token, layer, k] of every request."""
    experts = choices(rows)
    return (experts[at : at + REQUEST] for at in range(0, len(experts), REQUEST))


def counts(rows: int) -> np.ndarray:
    """int32[step, layer, expert]"""
    steps = max(rows // LAYERS, 1)
    return np.random.default_rng(0).integers(1, 5000, size=(steps, LAYERS, EXPERTS), dtype=np.int32)


def archives(folder: Path, rows: int) -> None:
    for number, experts in enumerate(requests(rows)):
        np.savez(folder / f"request-{number}.npz", routed_experts=experts, prompt_token_ids=np.arange(REQUEST - 99))


def table(folder: Path, rows: int, ending: str, shuffled: bool = False) -> None:
    """Each choice a row `token, layer, expert, rank_in_topk`."""
    experts = choices(rows)
    columns = dict(zip(("token", "layer", "rank_in_topk"), np.indices(experts.shape, np.int32), strict=True))
    columns["expert"] = experts
    order = np.random.default_rng(1).permutation(experts.size) if shuffled else slice(None)
    long = pa.table({name: column.ravel()[order] for name, column in columns.items()})
    (pacsv.write_csv if ending == "csv" else pq.write_table)(long, folder / f"log.{ending}")


def write_lines(folder: Path, name: str, records: Iterator[dict], separators: tuple[str, str] | None = None) -> None:
    """A file for every so many records, a line each."""
    for number, record in enumerate(records):
        with (folder / f"{name}-{number // ANSWERS_A_FILE}.jsonl").open("a") as file:
            file.write(json.dumps(record, separators=separators) + "\n")


def in_npy(experts: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, experts.astype(np.uint8))
    return base64.b64encode(file.getvalue()).decode()


def in_bytes(experts: np.ndarray) -> str:
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


def in_object(experts: np.ndarray) -> dict:
    return {"shape": list(experts.shape), "data": in_bytes(experts)}


def answers(folder: Path, rows: int, form: Callable[[np.ndarray], object], separators: tuple[str, str] | None = None) -> None:
    write_lines(folder, "answers", (answer(form(experts), USAGE) for experts in requests(rows)), separators)


def single_answers(folder: Path, rows: int) -> None:
    """A file for each, as `curl -o` saves it."""
    for number, experts in enumerate(requests(rows)):
        (folder / f"answer-{number}.json").write_text(json.dumps(answer(experts.tolist(), USAGE), separators=COMPACT))


def events(folder: Path, rows: int) -> None:
    """Streams as `curl` saves them: the answer comes a token a line."""
    for number, experts in enumerate(requests(rows)):
        parts = [experts[: USAGE["prompt_tokens"]], *np.split(experts[USAGE["prompt_tokens"] :], 99)]
        about, lines = {"id": f"cmpl-{number}", "object": "chat.completion.chunk"}, []
        for part in parts:
            choice = {"index": 0, "delta": {}, "routed_experts": part.tolist()}
            lines.append(json.dumps(about | {"choices": [choice]}, separators=COMPACT))
        (folder / f"stream-{number}.txt").write_text("".join(f"data: {line}\n\n" for line in lines))


def sglang_answers(folder: Path, rows: int) -> None:
    about = (USAGE | {"routed_experts": in_bytes(experts)} for experts in requests(rows))
    write_lines(folder, "answers", ({"text": "Yes", "meta_info": meta} for meta in about))


def save_dump(folder: Path, records: list[dict]) -> None:
    """A file of SGLang's recorder with every expert in the slot of its number."""
    import torch

    records = [
        {"forward_pass_id": number, "rank": 0, "gatherer_key": "primary"} | record for number, record in enumerate(records)
    ]
    content = {"records": records, "last_physical_to_logical_map": torch.arange(EXPERTS).repeat(LAYERS, 1)}
    torch.save(content, folder / "expert_distribution_recorder_1764000000.25_0.pt")


def sglang_tokens(folder: Path, rows: int) -> None:
    import torch  # which takes seconds and memory to load

    records = [
        {
            "input_ids": list(range(REQUEST)),
            "positions": list(range(REQUEST)),
            "extend_seq_lens": [REQUEST],
            "forward_mode": 1,
            "topk_ids_of_layer": torch.from_numpy(np.ascontiguousarray(experts.swapaxes(0, 1), dtype=np.int32)),
            "misc_objects": [],
        }
        for experts in requests(rows)
    ]
    save_dump(folder, records)


def route_logs(folder: Path, rows: int) -> None:
    experts = choices(rows)
    weights = json.dumps([round(1 / (at + 3), 6) for at in range(K)])
    for layer in range(LAYERS):
        lines = [json.dumps({"type": "meta", "model_id": "m", "top_k": K, "layers_logged": [layer]})]
        lines += (
            f'{{"type": "route", "req_id": "r{token // REQUEST}", "token_idx": {token % REQUEST}, "layer": {layer}, '
            f'"topk_ids": {ids}, "topk_weights": {weights}}}'
            for token, ids in enumerate(experts[:, layer].tolist())
        )
        (folder / f"routes-layer{layer}.jsonl").write_text("\n".join(lines))


def moe_balance(folder: Path, rows: int, separators: tuple[str, str] | None = None, weights: bool = False) -> None:
    more = {"topk_weights": [[round(1 / (at + 3), 6) for at in range(K)]] * REQUEST} if weights else {}
    more["origin_rows"] = [token % 8 for token in range(REQUEST)]
    records = (
        {"layer": layer, "batch_id": batch, "topk_experts": experts[:, layer].tolist()} | more
        for batch, experts in enumerate(requests(rows))
        for layer in range(LAYERS)
    )
    write_lines(folder, "trace", records, separators)


def megatron(folder: Path, rows: int) -> None:
    ranks = min(2, sum(1 for _ in requests(rows)))  # none of its files is empty
    for rank in range(ranks):
        with (folder / f"router_trace_rank{rank}.jsonl").open("w") as file:
            for step, experts in enumerate(requests(rows)):
                for layer in range(LAYERS) if step % ranks == rank else ():
                    about = {"step": step // ranks, "stage": "pre_dispatch", "block": "decoder", "layer": layer}
                    about |= {"rank": rank, "num_tokens": REQUEST, "topk": K}
                    file.write(json.dumps(about | {"top_indices": experts[:, layer].tolist()}) + "\n")


def sglang_statistics(folder: Path, rows: int) -> None:
    import torch

    torch.save({"rank": 0, "logical_count": torch.from_numpy(counts(rows))}, folder / "statistics.pt")


def sglang_passes(folder: Path, rows: int) -> None:
    import torch

    save_dump(folder, [{"global_physical_count": torch.from_numpy(step.copy())} for step in counts(rows)])


def sglang_csv(folder: Path, rows: int) -> None:
    """Each rank's counts of all layers."""
    for rank, step in enumerate(counts(rows)):
        lines = (f"{layer},{expert},{count}" for layer, row in enumerate(step.tolist()) for expert, count in enumerate(row))
        path = folder / f"expert_distribution_rank{rank}_timestamp1764000000.25.csv"
        path.write_text("\n".join(["layer_id,expert_id,count", *lines]))


def vllm_loads(folder: Path, rows: int) -> None:
    slots = [list(range(EXPERTS))] * LAYERS
    with (folder / "loads.jsonl").open("w") as file:
        for number, step in enumerate(counts(rows)):
            about = {"record_type": "eplb_load_stats", "version": 1, "step": number, "num_ranks": 8}
            file.write(json.dumps(about | {"expert_load": step.tolist(), "p2l_map": slots}) + "\n")


def tensorrt_llm(folder: Path, rows: int) -> None:
    meta = {"num_experts": EXPERTS, "num_experts_per_token": K}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    steps = counts(rows).astype(np.int64)
    tensors = {f"{step}_{layer}": row for step, table in enumerate(steps) for layer, row in enumerate(table)}
    save_file(tensors, folder / "rank0.safetensors")


def in_json(folder: Path, rows: int) -> None:
    """As SGLang's statistics."""
    (folder / "loads.json").write_text(json.dumps({"logical_count": counts(rows).tolist()}))


ROUTING = (
    Recording("npz", lambda folder, rows: np.savez(folder / "log.npz", experts=choices(rows))),
    Recording("npy", lambda folder, rows: np.save(folder / "log.npy", choices(rows))),
    Recording("npz, a request each", archives),
    Recording("CSV, sorted", partial(table, ending="csv"), 1_000_000),
    Recording("CSV, shuffled", partial(table, ending="csv", shuffled=True), 1_000_000),
    Recording("Parquet, sorted", partial(table, ending="parquet")),
    Recording("Parquet, shuffled", partial(table, ending="parquet", shuffled=True), 2_000_000),
    Recording("SGLang per_token", sglang_tokens, 5_000_000),
    Recording("SGLang answers", sglang_answers, 4_500_000, {"model": MODEL}),
    Recording("vLLM answers, npy", partial(answers, form=in_npy)),
    Recording("LightLLM answers", partial(answers, form=in_object)),
    Recording("vLLM lists", partial(answers, form=np.ndarray.tolist, separators=COMPACT)),
    Recording("vLLM lists, spaced", partial(answers, form=np.ndarray.tolist)),
    Recording("vLLM lists, a file each", single_answers),
    Recording("vLLM lists, streamed", events),
    Recording("route log", route_logs),
    Recording("moe-balance", moe_balance),
    Recording("moe-balance, compact", partial(moe_balance, separators=COMPACT)),
    Recording("moe-balance, weights", partial(moe_balance, weights=True)),
    Recording("Megatron", megatron, options={"stages": 1}),
)
LOADS = (
    Recording("SGLang stat", sglang_statistics, 150_000),
    Recording("SGLang stat, JSON", in_json, 20_000),
    Recording("SGLang per_pass", sglang_passes, 150_000),
    Recording("SGLang counts, CSV", sglang_csv, 64 * LAYERS),
    Recording("vLLM loads", vllm_loads, 60_000),
    Recording("TensorRT-LLM", tensorrt_llm, 75_000),
)
RECORDINGS = {recording.name: recording for recording in (*ROUTING, *LOADS)}
COLUMNS = {"": "26", "rows": "11", "files": "9", "read": "10", "CPU": "10", "rows/s": "12", "then checks": "13", "memory": "9"}


def peak() -> int:
    """The most bytes that this process held. `resource` would begin with those of the parent."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(name: str, folder: Path) -> dict[str, float]:
    """Seconds and CPU seconds to read, further seconds to check, bytes held at most while reading."""
    begin, cpu = time.perf_counter(), time.process_time()
    workload = read_workload(sorted(folder.iterdir()), **RECORDINGS[name].options)
    read, cpu, memory = time.perf_counter() - begin, time.process_time() - cpu, peak()
    check_recording(workload)
    checked = time.perf_counter() - begin - read
    rows = workload.experts.shape[0] * workload.experts.shape[1] if isinstance(workload, RoutingTrace) else 0
    return {"read": read, "cpu": cpu, "checked": checked, "memory": memory, "rows": rows}


def row_of(recording: Recording, rows: int) -> tuple[str, ...]:
    """The table's row of a format, measured in a child."""
    rows = min(rows, recording.most)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recording.write(folder, rows)
        length = sum(path.stat().st_size for path in folder.iterdir())
        answer = in_child("tests.benchmarks.bench_formats", recording.name, name)
    rows = answer["rows"] or rows
    read, cpu, checked = (seconds(answer[name]) for name in ("read", "cpu", "checked"))
    rate, memory = f"{rows / answer['read']:,.0f}", size(answer["memory"])
    return recording.name, f"{rows:,}", size(length), read, cpu, rate, checked, memory


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]))))
        return
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    row = columns(COLUMNS)
    for name, recording in RECORDINGS.items():
        if any(word in name for word in sys.argv[2:] or [""]):
            row(*row_of(recording, rows))


if __name__ == "__main__":
    main()
