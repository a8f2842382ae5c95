"""NCCL's rules on processors: a rank of a launch with collectives over Gloo, but only in the order that NCCL would keep.

    python -m tests.launch.nccl_rules FOLDER     (in place of engine.launch.worker)

The rules of NCCL that Gloo does not have, enforced here (NCCL user guide, "Using multiple communicators" and "Point-to-point
communication"; PyTorch's notes on `batch_isend_irecv` and on `init_process_group(device_id=…)`):

* A communicator is one queue: operations run in the order in which a rank hands them over. Tags mean nothing; between two
  ranks the first send goes to the first receive.
* A send ends when it has been received.
* A batch is one entry, and its parts progress together; all of them use one communicator.
* A communicator is made by its first use, which waits for all of its members (lazily), or as its group is made (eagerly).
* `wait` lets the current stream wait, not the host. A barrier keeps the host waiting.

SWITCHYARD_NCCL holds words, separated by commas:

* `eager`: communicators are made with their groups, as on GPUs, which `joining` names.
* `one-queue`: all communicators of a rank share one queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1 or with kernels that fill a
  device: then only an order of launches that is the same on all ranks ends.
* `late`: `wait` returns at once and incoming numbers are NaN until they have arrived; every operation of PyTorch runs after
  the ones waited for, as kernels of one stream do. The host's clock, or a view of memory that NumPy reads, does not wait.
* `uneven`: the computations of a training step take longer by chance, on every rank by another one.
* `two-machines`: every rank takes itself for a machine of its own, so that clocks are compared.
"""

import contextlib
import json
import os
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from engine.launch import worker
from engine.runtime.exchange import recorder
from engine.runtime.exchange.recorder import Recorder

PATIENCE = float(os.environ.get("SWITCHYARD_NCCL_PATIENCE", 8))
"""Seconds after which an operation is taken to wait for ever."""
DELAY = 0.002
"""Seconds by which the stream lags behind the host, where `wait` returns at once or ranks are uneven."""
LATE = 0.006
"""Seconds that a computation of an uneven rank takes longer at most."""
WORDS = set(filter(None, os.environ.get("SWITCHYARD_NCCL", "").split(",")))
MAY_SEND_ALONE = {("layers.py", "outputs"), ("check.py", "_from_zero")}
"""(file, function) that may send or receive outside a batch: a communicator of two ranks is made for each pair."""

gloo = {
    name: getattr(dist, name)
    for name in (
        *("init_process_group", "new_group", "get_backend", "all_reduce", "all_gather_object"),
        *("all_to_all_single", "barrier", "broadcast", "isend", "irecv"),
    )
}


class NcclError(RuntimeError):
    """A rule was broken."""


class Entry:
    """An operation handed over to a communicator. run: carries it out; text: its name"""

    def __init__(self, text: str, run: Callable[[], None]) -> None:
        self.text, self.run = text, run
        self.done, self.failure = threading.Event(), None

    def finish(self) -> None:
        """Until it has ended."""
        if not self.done.wait(PATIENCE):
            raise NcclError(f"nothing moved for {PATIENCE:g} s; heads of the queues: {heads()}")
        if self.failure is not None:
            raise self.failure

    def wait(self, timeout: object = None) -> bool:
        """As of a work of NCCL's."""
        if "late" in WORDS:
            stream.waits_for.append(self)
        else:
            self.finish()
        return True


class Queue:
    """A queue of operations that run one after another in the order of their hand-over."""

    def __init__(self, name: str) -> None:
        self.name, self.entries = name, queue.SimpleQueue()
        self.running: Entry | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, text: str, run: Callable[[], None]) -> Entry:
        entry = Entry(text, run)
        self.entries.put(entry)
        return entry

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                self.running = entry = self.entries.get()
                if WORDS & {"late", "uneven"}:
                    time.sleep(DELAY)
                try:
                    entry.run()
                except BaseException as failure:  # raised where it is waited for
                    entry.failure = failure
                self.running = None
                entry.done.set()


class Communicator:
    """group: of Gloo, which carries the operations of this one; first: number of the first operation between two ranks, above 0
    for a communicator of a pair, which is made by the two and shares the group's tags"""

    def __init__(self, group: dist.ProcessGroup | None, name: str, first: int = 0) -> None:
        self.group, self.name, self.first = group, name, first
        key = "all communicators" if "one-queue" in WORDS else name
        if key not in queues:
            queues[key] = Queue(key)
        self.queue = queues[key]
        self.made = first > 0
        self.passed: Counter[tuple[str, int]] = Counter()
        self.pool = ThreadPoolExecutor(64)
        if "eager" in WORDS:
            self.make()

    def make(self) -> None:
        """Meet all other members, which keeps the host waiting."""
        if not self.made:
            self.made = True
            self.put("its making", lambda: gloo["barrier"](self.group)).finish()

    def put(self, text: str, run: Callable[[], None]) -> Entry:
        return self.queue.put(f"{self.name}: {text}", run)

    def collective(self, text: str, run: Callable[[], None]) -> Entry:
        self.make()
        return self.put(text, run)

    def batch(self, operations: list[tuple[str, torch.Tensor, int]]) -> Entry:
        """(send or receive, what, the other rank), which progress together."""
        numbered = []
        for way, tensor, peer in operations:
            numbered.append((way, tensor, peer, self.first + self.passed[way, peer]))
            self.passed[way, peer] += 1
            if way == "receive":
                spoil(tensor)

        def run() -> None:
            parts = [self.pool.submit(self._send if way == "send" else self._receive, *part) for way, *part in numbered]
            for part in parts:
                part.result()

        text = ", ".join(f"{way} {'to' if way == 'send' else 'from'} {peer}" for way, _, peer, _ in numbered)
        return self.put(text, run)

    def _send(self, tensor: torch.Tensor, peer: int, number: int) -> None:
        word = torch.zeros(1, dtype=torch.uint8)
        received = gloo["irecv"](word, peer, self.group, 2 * number + 1)
        gloo["isend"](tensor.contiguous(), peer, self.group, 2 * number).wait()
        received.wait()

    def _receive(self, tensor: torch.Tensor, peer: int, number: int) -> None:
        with torch.inference_mode():
            arriving = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            gloo["irecv"](arriving, peer, self.group, 2 * number).wait()
            tensor.copy_(arriving)
            gloo["isend"](torch.zeros(1, dtype=torch.uint8), peer, self.group, 2 * number + 1).wait()


class Stream(TorchDispatchMode):
    """The kernels of the thread that computes: each runs after all that was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_for: list[Entry] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        while self.waits_for:
            self.waits_for.pop(0).finish()
        return func(*args, **(kwargs or {}))


stream = Stream()
queues: dict[str, Queue] = {}
communicators: dict[dist.ProcessGroup | None, Communicator] = {}


def heads() -> str:
    """The operation at the head of every queue of this rank."""
    running = [queue.running for queue in queues.values()]
    return "; ".join(entry.text for entry in running if entry is not None) or "all are empty"


def spoil(tensor: torch.Tensor) -> None:
    """Nothing has arrived yet."""
    if "late" in WORDS:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 127)


def of(group: dist.ProcessGroup | None) -> Communicator:
    return communicators[None if group is None or group is dist.group.WORLD else group]


# Stand-ins for functions of `torch.distributed`, with their names and arguments.


def init_process_group(backend, *, store, rank, world_size, timeout, device_id=None):
    gloo["init_process_group"]("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    communicators[None] = Communicator(None, "all ranks")


def new_group(ranks=None, timeout=None, backend=None, **_):
    group = gloo["new_group"](ranks, timeout, "gloo")
    if backend != "gloo" and (ranks is None or dist.get_rank() in ranks):
        communicators[group] = Communicator(group, f"group {len(communicators)}")
    return group


def get_backend(group=None):
    return "nccl" if group is None or group in communicators else "gloo"


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    if get_backend(group) == "gloo":
        return gloo["all_reduce"](tensor, op, group, async_op)
    return in_place(tensor, "all-reduce", group, async_op, lambda own: gloo["all_reduce"](own, op, group))


def broadcast(tensor, src=None, group=None, async_op=False):
    return in_place(tensor, "broadcast", group, async_op, lambda own: gloo["broadcast"](own, src, group))


def in_place(tensor, text, group, async_op, carry_out):
    """A collective that writes its outcome over its input."""
    own = tensor.clone()
    spoil(tensor)

    def run():
        carry_out(own)
        tensor.copy_(own)

    return handed_over(of(group).collective(text, run), async_op)


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    spoil(output)

    def run():
        arriving = torch.empty_like(output)
        gloo["all_to_all_single"](arriving, input, output_split_sizes, input_split_sizes, group)
        output.copy_(arriving)

    return handed_over(of(group).collective("all-to-all", run), async_op)


def barrier(group=None, async_op=False, device_ids=None):
    of(group).collective("barrier", lambda: gloo["barrier"](group)).finish()


def all_gather_object(object_list, obj, group=None):
    of(group).collective("all-gather of objects", lambda: gloo["all_gather_object"](object_list, obj, group)).finish()


def batch_isend_irecv(operations):
    groups = {operation.group for operation in operations}
    if len(groups) != 1:
        raise NcclError("a batch of several communicators")
    (group,) = groups
    of(group).make()
    ways = {isend: "send", irecv: "receive"}
    return [of(group).batch([(ways[operation.op], operation.tensor, operation.peer) for operation in operations])]


def isend(tensor, dst=None, group=None, tag=0):
    return alone("send", tensor, dst, group, tag)


def irecv(tensor, src=None, group=None, tag=0):
    return alone("receive", tensor, src, group, tag)


def send(tensor, dst=None, group=None, tag=0):
    alone("send", tensor, dst, group, tag).wait()


def recv(tensor, src=None, group=None, tag=0):
    alone("receive", tensor, src, group, tag).wait()


def alone(way, tensor, peer, group, tag):
    """Outside a batch: over a communicator of the two ranks, or eagerly over that of the group."""
    if get_backend(group) == "gloo":
        return gloo["isend" if way == "send" else "irecv"](tensor, peer, group, tag)
    caller = sys._getframe(2)
    place = Path(caller.f_code.co_filename).name, caller.f_code.co_name
    if place not in MAY_SEND_ALONE:
        raise NcclError(f"{place[0]}, {place[1]}: a {way} outside a batch")
    communicator = of(group)
    if "eager" not in WORDS:
        pair = f"ranks {' and '.join(map(str, sorted((dist.get_rank(), peer))))}"
        communicator = communicators.setdefault(pair, Communicator(group, pair, first=1 << 20))
    return communicator.batch([(way, tensor, peer)])


def handed_over(entry: Entry, async_op: bool) -> Entry | None:
    if async_op:
        return entry
    entry.wait()
    return None


def patch() -> None:
    """Put these rules in the place of `torch.distributed`."""
    mine = (init_process_group, new_group, get_backend, all_reduce, broadcast, all_to_all_single, barrier)
    mine += (all_gather_object, batch_isend_irecv, isend, irecv, send, recv)
    for function in mine:
        setattr(dist, function.__name__, function)
    for function in (isend, irecv):  # which P2POp knows by these names
        setattr(distributed_c10d, function.__name__, function)


def compare_clocks(folder: Path) -> None:
    """Let every rank take itself for a machine of its own, and write how far it finds its clock from rank 0's, which is the
    same, with the error that it states."""
    align, recorder.BOOT = Recorder.align, Path("/no-such-file")

    def align_and_tell(self: Recorder, ranks: int) -> None:
        align(self, ranks)
        (folder / f"clock-{self.rank}.json").write_text(json.dumps([self.offset, self.clock_error]))

    Recorder.align = align_and_tell


def be_uneven() -> None:
    """Let the computations of a training step take up to `LATE` seconds longer."""
    from engine.launch.step.run import BoundTask

    compute, chance = BoundTask.compute, random.Random(int(os.environ["RANK"]))

    def compute_late(self: BoundTask) -> None:
        time.sleep(chance.uniform(0, LATE))
        compute(self)

    BoundTask.compute = compute_late


if __name__ == "__main__":
    patch()
    if "uneven" in WORDS:
        be_uneven()
    if "two-machines" in WORDS:
        compare_clocks(Path(sys.argv[1]))
    with stream if "late" in WORDS else contextlib.nullcontext():
        worker.main(Path(sys.argv[1]))
