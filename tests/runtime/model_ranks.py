"""The ranks of `test_models`: `python -m tests.runtime.model_ranks 0 1 FOLDER`, with the cases in the file that `CASES` names.

Imports of transformers take seconds, so this process does them once and forks the ranks. Each has sequences of its own, in
other numbers and lengths, and writes how the planned models of all families compare with the plain ones.
"""

import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine.errors import InputError, LostRankError
from engine.plan import Plan
from engine.runtime import checkpoint
from engine.runtime.apply import apply_plan
from engine.runtime.checkpoint import Reader
from engine.runtime.gradients import reduce_gradients
from engine.runtime.weights import load_planned
from tests.cases.tiny_models import config_of, model_of, relative, tokens_of

RANKS = 4
WORDS = 20
ENDS = (8, 3, 5, 1)
"""Tokens after which the ranks' sequences end under `linear`; `WORDS` under other plans."""
BIG = {
    "olmoe": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3},
    "deepseek_v3": {"hidden_size": 256, "moe_intermediate_size": 768, "num_hidden_layers": 4},
}
"""Sizes of the models that memory is measured with, each with three MoE layers."""


def own_tokens(rank: int) -> torch.Tensor:
    """int64[rank + 1, 5 + rank]"""
    return tokens_of(rank + 1, 5 + rank, seed=rank)


def logits_of(model: torch.nn.Module, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return model(own_tokens(rank)).logits


def words_of(model: torch.nn.Module, rank: int, count: int) -> torch.Tensor:
    return model.generate(own_tokens(rank), max_new_tokens=count, do_sample=False)


def live(family: str, plans: dict[str, str], folder: Path, rank: int) -> dict:
    """The answers and gradients of a model of a family under each plan, compared with the plain one's, as `apply_plan` makes it
    and as it comes out of a folder."""
    plain, outcome = model_of(family), {}
    wanted = logits_of(plain, rank), words_of(plain, rank, WORDS)
    for other in range(RANKS):
        loss_of(plain, other).backward()
    for name, text in plans.items():
        plan = Plan.model_validate_json(text)
        model = apply_plan(model_of(family), plan)
        count = ENDS[rank] if name == "linear" else WORDS
        words = words_of(model, rank, count)
        outcome[name] = {
            "logits": relative(logits_of(model, rank), wanted[0]),
            "same words": torch.equal(words, wanted[1][:, : words.shape[1]]) and words.shape[1] == 5 + rank + count,
            "gradients": one_step(model, plain, plan, rank),
            "numbers": sum(parameter.numel() for parameter in model.parameters()),
            "loaded": loaded(folder / family, plan, rank, wanted[0]),
        }
    return outcome


def loaded(folder: Path, plan: Plan, rank: int, wanted: torch.Tensor) -> dict:
    """The logits of a model out of a folder, compared with those wanted, and the tensors that were read of it."""
    read, copy = [], Reader.copy

    def noted(self: Reader, name: str, place: torch.Tensor, row: int | None = None) -> None:
        read.append([name, row])
        copy(self, name, place, row)

    with mock.patch.object(Reader, "copy", noted):
        model = load_planned(folder, plan)
    return {"logits": relative(logits_of(model, rank), wanted), "read": read}


def loss_of(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """The loss of a training step on the tokens of a rank."""
    tokens = own_tokens(rank)
    return model.train()(tokens, labels=tokens).loss


def one_step(model: torch.nn.Module, plain: torch.nn.Module, plan: Plan, rank: int) -> float:
    """The largest difference of a gradient from the plain model's, which has that of the sum of all ranks' losses, relative to
    the largest number of the whole parameter's."""
    loss_of(model, rank).backward()
    reduce_gradients(model)
    wanted, differences = dict(plain.named_parameters()), []
    for name, parameter in model.named_parameters():
        whole = name.replace(".experts.experts.", ".experts.")
        of_all = theirs = wanted[whole].grad
        if whole != name:
            layer = int(name.split(".")[2])
            held = plan.placement.experts_of_gpu[plan.placement.model_layers.index(layer)][rank]
            theirs = of_all[list(dict.fromkeys(held))]
        assert parameter.grad.shape == theirs.shape and of_all.any(), name
        differences.append(float((parameter.grad - theirs).abs().amax() / of_all.abs().max()) if len(theirs) else 0.0)
    return max(differences)


def status(name: str) -> int:
    """Bytes of this process: VmRSS of its memory, VmHWM the most since the mark was set back, RssAnon what is no file's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def memory(folder: Path, plan: Plan) -> dict[str, int]:
    """Bytes by which this process grows with its weights, and at most meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
    resident, anonymous = status("VmRSS"), status("RssAnon")
    with mock.patch.object(checkpoint, "MAPPED", 0):  # which is many times these models
        model = load_planned(folder, plan)
    grown = {"kept": status("RssAnon") - anonymous, "peak": status("VmHWM") - resident}
    del model
    return grown


def refused(folder: Path, plan: Plan, rank: int) -> str:
    """The message of each rank when rank 2 does not find the folder."""
    try:
        load_planned(folder if rank != 2 else folder / "elsewhere", plan)
    except InputError as error:
        return str(error)
    return ""


def bereft(folder: Path, plans: dict[str, str], groups: dict[str, dist.ProcessGroup], rank: int) -> Iterator[str]:
    """The messages of the ranks that are left when the last one is killed: while weights load, in a forward pass of the others,
    and in a backward pass of two."""
    copy, own = Reader.copy, itertools.count()

    def killed(*arguments, **named) -> None:
        if rank == RANKS - 1 and next(own) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        copy(*arguments, **named)

    with mock.patch.object(Reader, "copy", killed):
        yield said_of_loss(lambda: load_planned(folder, Plan.model_validate_json(plans["4"])))

    def end(*_) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for ranks in (3, 2):
        if rank < ranks:
            model = apply_plan(model_of("mixtral"), Plan.model_validate_json(plans[str(ranks)]), groups[str(ranks)])
            if rank == ranks - 1:
                layers = model.model.layers
                layers[0].register_forward_pre_hook(end) if ranks == 3 else layers[1].register_full_backward_hook(end)
            yield said_of_loss(lambda model=model: loss_of(model, rank).backward())


def said_of_loss(work: Callable[[], object]) -> str:
    """The message of a rank that loses another one at some work."""
    try:
        work()
    except LostRankError as error:
        return str(error)
    return ""


def run(rank: int, folder: Path, cases: dict) -> None:
    """One rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    groups = {"3": dist.new_group([0, 1, 2]), "2": dist.new_group([0, 1])}
    outcome = {"live": {}, "bereft": []}
    for family, plans in cases["plans"].items():
        outcome["live"][family] = live(family, plans, Path(cases["folders"]), rank)
    big = {
        family: (Path(cases["folders"]) / f"big {family}", Plan.model_validate_json(cases["big plans"][family]))
        for family in BIG
    }
    outcome["memory"] = {family: memory(*each) for family, each in big.items()}
    outcome["refused"] = refused(*big["olmoe"], rank)
    (folder / f"of-{rank}.json").write_text(json.dumps(outcome))
    for said in bereft(Path(cases["folders"]) / "mixtral", cases["ends"], groups, rank):
        outcome["bereft"].append(said)
        (folder / f"of-{rank}.json").write_text(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # the group is broken


def save(folder: Path, families: Sequence[str]) -> None:
    """Write the models that ranks load."""
    for family in families:
        model_of(family).save_pretrained(folder / family)
    for family, sizes in BIG.items():
        AutoModelForCausalLM.from_config(config_of(family, **sizes)).save_pretrained(folder / f"big {family}")


def main(folder: Path) -> None:
    cases = json.loads(Path(os.environ["CASES"]).read_text())
    torch.set_num_threads(1)
    words_of(model_of("mixtral"), 0, 2)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "temporary")
    (folder / "temporary").mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, folder, cases)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0] + [-signal.SIGKILL] * 3
    assert not list((folder / "temporary").iterdir())
    outcomes = [json.loads((folder / f"of-{rank}.json").read_text()) for rank in range(RANKS)]
    (folder / "outcome-0.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[3]))
