"""Small files of many kinds as other programs write them, and the answer that a bad file must get."""

import gzip
import json
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.formats import read_workload


def refused(path: Path, *parts: str, read: Callable = read_workload, **options: object) -> str:
    """Return the message of the InputError that reading `path` must raise: one line that begins with the file's name.

    parts: texts that the message must contain.
    read: the function that reads the file.
    options: further arguments of `read`.
    """
    with pytest.raises(InputError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert message.startswith(path.name) and "\n" not in message and str(path.parent) not in message
    for part in parts:
        assert part in message, message
    return message


def saver(name: str) -> Callable[..., Path]:
    """Return a function that saves bytes or a text as they are, and anything else as JSON, in a folder: under `name`, or
    under a third argument."""

    def saved(folder: Path, content: object, name: str = name) -> Path:
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        path = folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return saved


def json_lines(records: Iterable[object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""

CUBE_MESH = [
    "X NV1 NV1 NV2 NV2 SYS SYS SYS",
    "NV1 X NV2 NV1 SYS NV2 SYS SYS",
    "NV1 NV2 X NV2 SYS SYS NV1 SYS",
    "NV2 NV1 NV2 X SYS SYS SYS NV1",
    "NV2 SYS SYS SYS X NV1 NV1 NV2",
    "SYS NV2 SYS SYS NV1 X NV2 NV1",
    "SYS SYS NV1 SYS NV1 NV2 X NV2",
    "SYS SYS SYS NV1 NV2 NV1 NV2 X",
]
"""DGX-1: six links a GPU, four peers linked, three not."""

BRIDGED = ["X NV12 SYS SYS", "NV12 X SYS SYS", "SYS SYS X NV12", "SYS SYS NV12 X"]


def everywhere(cell: str, gpus: int) -> list[str]:
    return [" ".join("X" if a == b else cell for b in range(gpus)) for a in range(gpus)]


def printed(rows: list[str], nics: int = 0, nic: str = "NIC", affinity: str = "NUMA", escapes: bool = False) -> str:
    """Return the matrix in the layout of nvidia-smi: tabs, X between blanks, rows of the network cards without affinity."""
    names = [f"GPU{at}" for at in range(len(rows))] + [f"{nic}{at}" for at in range(nics)]
    tail = {"": "", "CPU": "\tCPU Affinity", "NUMA": "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"}[affinity]
    own = {"": "", "CPU": "\t0-23,48-71", "NUMA": "\t0-47,96-143\t0\t\tN/A"}[affinity]
    head = "\t" + "\t".join(names) + tail
    lines = [f"\x1b[4m{head}\x1b[0m" if escapes else head]
    for name, row in zip(names, rows, strict=False):
        cells = [f" {cell} " if cell == "X" else cell for cell in row.split()]
        lines.append("\t".join([name, *cells, *["PXB"] * nics]) + own)
    for at in range(nics):
        others = [" X " if at == other else "NODE" for other in range(nics)]
        lines.append("\t".join([f"{nic}{at}", *["PXB"] * len(rows), *others]))
    return "\n".join(lines) + "\n" + LEGEND


def rocm_tables(rows: list[str], names: str = "GPU{}", title: str = "====== {} between two GPUs ======", hops: int = 1) -> str:
    """The tables of rocm-smi --showtopo, or with BDFs and other titles of amd-smi topology."""
    gpus, text = [names.format(at) for at in range(len(rows))], "====== ROCm System Management Interface ======\n"
    for fact, cell in (("Weight", "15"), ("Hops", str(hops)), ("Link Type", None)):
        text += f"{title.format(fact if 'two' in title else fact.upper())}\n       {'   '.join(gpus)}  \n"
        for gpu, row in zip(gpus, rows, strict=True):
            cells = [("SELF" if ":" in names else "0") if word == "X" else cell or word for word in row.split()]
            text += f"{gpu}   {'    '.join(cells)}   \n"
    return text + "====== Numa Nodes ======\nGPU[0]\t\t: (Topology) Numa Node: 0\n====== End of ROCm SMI Log ======\n"


NCCL_DEVICE = "NVIDIA H100 80GB HBM3"


def nccl_test_log(
    test: str | None = "alltoall_perf",
    gpus: int = 4,
    redop: str = "none",
    rows=((1024, 10.0), (1048576, 50.0)),
    nodes: int = 1,
    root: str = "      -1",
    share: float | None = None,
) -> str:
    """Return the output of a test in the layout of nccl-tests."""
    share = (2 if redop == "sum" else 1) * (gpus - 1) / gpus if share is None else share
    head = ["# nccl-tests version 2.17.1 nccl-headers=22703 nccl-library=22703", f"# Collective test starting: {test}"]
    lines = head if test is not None else []
    lines += ["# nThread 1 nGpus 1 minBytes 1024 maxBytes 1048576 step: 1024(factor) warmup iters: 5 iters: 20", "#"]
    lines += ["# Using devices"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {4000 + rank} on  host{rank * nodes // gpus} device {rank:2} [0x0{rank}] {NCCL_DEVICE}"
        for rank in range(gpus)
    ]
    lines += [
        "#",
        "#                                                       out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    ]
    for size, time in rows:
        rate = size / time / 1e3 if time else 0.0
        cells = f"{time:8.2f} {rate * 100:7.2f} {rate * 100 * share:7.2f}"
        lines.append(f"{size:12} {size // 4:13} float {redop:>7} {root} {cells}      0 {time * 9:8.2f}    1.00    1.00    N/A")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3", "#"]
    return "\n".join(lines) + "\n"


def side(size: int, wrong: object = 0.0, **other: object) -> dict:
    return {"time": size / 100, "alg_bw": 100.0, "bus_bw": 75.0, "nwrong": wrong} | other


def nccl_json(sizes=(1024, 2048, 4096), binary="./build/alltoall_perf", gpus=4, inside=True, **top: object) -> dict:
    """The file of nccl-tests -J, with the devices inside its configuration, as 2.18 has them, or next to it."""
    devices = [
        {
            "rank": rank,
            "group": 0,
            "pid": 1,
            "hostname": "host0",
            "device": 0,
            "device_hex": f"0000:0{rank}:00",
            "device_info": "X",
        }
        for rank in range(gpus)
    ]
    config = {"nthreads": 1, "minimum_bytes": 1024, "maximum_bytes": 4096, "step_factor": 2}
    row = {"count": 1, "type": "float", "redop": "none", "root": "    -1", "in_place": side(1, None), "experiment_name": ""}
    results = [{"size": size} | row | {"out_of_place": side(size)} for size in sizes]
    about = {"config": config | {"devices": devices}} if inside else {"config": config, "devices": devices}
    head = {"version": 3, "args": [binary, "-J", "x"], "env": ["A=[{"], "nccl_version": 22800} | about
    return head | {"results": results, "out_of_bounds": {"count": 0, "okay": "true"}} | top


def rccl_record(size: int, in_place: int = 0, **other: object) -> dict:
    about = {"numCycle": 0, "name": "AlltoAll", "nodes": 2, "ranks": 16, "ranksPerNode": 8, "gpusPerRank": 1, "size": size}
    rates = {"type": "float", "redop": "none", "inPlace": in_place, "time": size / 100, "algBw": 100.0, "busBw": 93.75}
    return about | rates | {"wrong": "0"} | other


SIZES = (1 << 10, 1 << 20, 1 << 26)
ALPHA = 20e-6


def pair_log(ends, rate: float, binary="sendrecv_perf", device="NVIDIA H100 80GB HBM3", sizes=SIZES) -> str:
    """Return the log of one pair of GPUs, with a start-up of 20 µs. ends: (host, bus) of both; rate: bytes/s each way"""
    sent = 0.5 if binary == "alltoall_perf" else 1
    lines = ["# nccl-tests version 2.17.6", f"# Collective test starting: {binary}", "#", "# Using devices"]
    lines += [
        f"#  Rank  {rank} Group  0 Pid {44 + rank} on {host} device  0 [{bus}] {device}"
        for rank, (host, bus) in enumerate(ends)
    ]
    lines += [
        "#",
        "#                                                out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time",
    ]
    for size in sizes:
        micros = (ALPHA + sent * size / rate) * 1e6
        lines.append(f"{size:12} {size // 8:8} double none -1 {micros:.4f} {size / micros / 1e3:.2f} 1.00 0 7.0 1.0 1.0 N/A")
    return "\n".join([*lines, "# Avg bus bandwidth    : 13.4", f"# Collective test concluded: {binary}"]) + "\n"


def logs(folder: Path, rate_of, ends, **options) -> list[Path]:
    """Save one log for each pair of ends that has a rate."""
    paths = []
    for number, (a, b) in enumerate(combinations(ends, 2)):
        if (rate := rate_of(a, b)) is not None:
            path = folder / f"{number}.log"
            path.write_text(pair_log((a, b), rate, **options))
            paths.append(path)
    return paths


NODES = [(host, bus) for host in ("node2", "node10") for bus in ("0000:1b:00", "0000:43:00")]


def two_nodes(a, b) -> float:
    return 300e9 if a[0] == b[0] else 40e9


def operator(name="aten::mm", dims=((16, 32), (32, 64)), kind="c10::BFloat16", id=1, dur=99.0) -> dict:
    args = {"External id": id, "Input Dims": [list(dim) for dim in dims], "Input type": [kind] * len(dims)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 1.0, "dur": dur, "pid": 1, "tid": 1, "args": args}


def kernel(id=1, dur=10.0, name="gemm_kernel") -> dict:
    args = {"External id": id, "device": 0, "stream": 7}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 2.0, "dur": dur, "pid": 0, "tid": 7, "args": args}


def collective(name="all_to_allv", count=1024, dtype="BFloat16", ranks=8, dur=50.0) -> dict:
    event = kernel(id=None, dur=dur, name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    event["args"] |= {"Collective name": name, "In msg nelems": count, "Out msg nelems": count, "In split size": "[]"}
    event["args"] |= {"Group size": ranks, "dtype": dtype, "Process Group Ranks": "[0, 1, 2]"}
    return event


def profiler_trace(*events, device="NVIDIA H100 80GB HBM3", **more) -> dict:
    return {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": device}], "traceEvents": list(events)} | more


def saved_trace(folder: Path, data: object, name: str = "step.json") -> Path:
    text = json.dumps(data).encode()
    return saver(name)(folder, gzip.compress(text) if name.endswith(".gz") else text)


WAITS_HEAD = (
    "[2026-01-19T17:40:46.123] [Diagnose] InstanceID: a36ddd16-a8d0-43bf-9e8a-f196f23010d5 EPSize: 4, diagnose: "
    "{{'abnormal_cols': [], 'abnormal_rows': [], 'abnormal_points': []}}, "
    "{part} Wait Recv Cost Per Token Matrix[src_rank, dst_rank]"
)

STEADY_WAITS = ((16, 13, 10, 17), (10, 19, 11, 18), (18, 18, 12, 10), (13, 18, 16, 12))
SLOW_WAITS = ((16, 13, 10, 1170), (10, 19, 11, 1180), (18, 18, 12, 1100), (13, 18, 16, 1120))


def waits_log(part: str, rows, bare: bool = False) -> str:
    lines = [WAITS_HEAD.format(part=part) + (":" if bare else "")]
    for rank, row in enumerate(rows):
        cells = f"[{' '.join(f'{value:8d}' for value in row)}]"
        lines.append(cells if bare else f"[2026-01-19T17:40:46.124] rank={rank} {cells}")
    return "\n".join(lines) + "\n"


TIMES_TABLE = """Operation,gpu,dtype,m,n,k,bytes,ranks,seconds,note
gemm,type-0,bf16,16,64,32,,,1e-5,
gemm,type-0,bf16,16,64,32,,,3e-5,
gemm,type-0,bf16,16,64,32,,,1.5e-5,the median
gemm,type-0,bf16,256,64,32,,,4e-5,
gemm,type-0,fp8,16,64,32,,,5e-6,
memory,type-0,,,,,1e6,,1e-3,
all_to_all,,,,,,1024,4,1e-4,
all_to_all,,,,,,4096,4.0,2e-4,
all_to_all,,,,,,1024,8,3e-4,
all_reduce,,,,,,2048,4,4e-4,
send_receive,,,,,,512,4,5e-4,
"""


def config(kind: str, hidden: int, inner: int, layers: int, k: int, **more: object) -> dict:
    """A `config.json` of Hugging Face. k: experts of a token"""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_experts_per_tok": k}
    return {"model_type": kind} | sizes | more


MIXTRAL = config("mixtral", 4096, 14336, 32, 2, num_local_experts=8, torch_dtype="bfloat16")
DEEPSEEK_V3 = config("deepseek_v3", 7168, 18432, 61, 8, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1)
DEEPSEEK_V3 |= {"first_k_dense_replace": 3, "moe_layer_freq": 1, "torch_dtype": "bfloat16"}
DEEPSEEK_V3 |= {"quantization_config": {"quant_method": "fp8"}}
QWEN2_MOE = config("qwen2_moe", 2048, 5632, 24, 4, moe_intermediate_size=1408, num_experts=60)
QWEN2_MOE |= {"shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "mlp_only_layers": []}
GPT_OSS = config("gpt_oss", 2880, 2880, 36, 4, num_local_experts=128, experts_per_token=4)
GPT_OSS |= {"quantization_config": {"quant_method": "mxfp4"}}
LLAMA_4 = {"model_type": "llama4", "dtype": "float16", "vision_config": {"hidden_size": 1}}
LLAMA_4 |= {"text_config": config("llama4_text", 5120, 8192, 4, 1, num_local_experts=16, interleave_moe_layer_step=2)}

BALANCE_CHOICES = {("a", 1): [[0, 5], [3, 2]], ("a", 2): [[4, 1], [0, 7]], ("b", 1): [[6, 5]], ("b", 2): [[2, 3]]}
BALANCE_ROWS = {"a": [1, 0], "b": [3]}


def balance_line(layer: int, batch: object, experts: object, rows: object = (), **more: object) -> dict:
    return {"layer": layer, "batch_id": batch, "origin_rows": rows, "topk_experts": experts} | more


def balance_lines(rows: bool = True, **more: object) -> list[dict]:
    """Return lines ordered by layer, as a converter that goes through layers first writes them."""
    by_layer = sorted(BALANCE_CHOICES.items(), key=lambda item: -item[0][1])
    rows_of = BALANCE_ROWS if rows else {"a": [], "b": []}
    return [balance_line(layer, batch, experts, rows_of[batch], **more) for (batch, layer), experts in by_layer]
