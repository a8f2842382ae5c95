"""The ranks of `test_moving`: `python -m tests.runtime.moving_ranks 0 1 FOLDER`. Each has sequences of its own; plans are
exchanged under a generation and before a training step, and refused, and at last broken off."""

import ctypes
import json
import sys
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from engine.errors import InputError
from engine.plan import Placement, Plan
from engine.runtime.apply import apply_plan
from engine.runtime.gradients import reduce_gradients
from engine.runtime.live import LiveExchange
from engine.runtime.moving import exchange_plan
from tests.cases.forks import forked
from tests.cases.plans import plan_of as plan_at
from tests.cases.tiny_models import config_of, model_of, plan_of, tokens_of
from tests.runtime.layer_ranks import Counted

RANKS = 4
WORDS, AT = 64, (20, 40)
"""Tokens of a generation, and the steps before which its plan is exchanged."""
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
"""Sizes of the model that memory is measured with."""
M_MMAP_THRESHOLD = -3
"""The constant of malloc.h."""


def even(layers: int, experts: int = 8, ranks: int = RANKS, shift: int = 0) -> Plan:
    """Experts in blocks, those of a rank at the rank `shift` further."""
    size = experts // ranks
    blocks = [tuple(range(rank * size, (rank + 1) * size)) for rank in range(ranks)]
    row = tuple(blocks[(rank - shift) % ranks] for rank in range(ranks))
    return plan_at(Placement(experts=experts, experts_of_gpu=(row,) * layers, model_layers=tuple(range(layers))))


def plans_of(family: str) -> list[Plan]:
    """The plans of a generation, one after another: EPLB's has replicas, and Aurora's an order."""
    model = model_of(family)
    linear, eplb = plan_of(model, RANKS), plan_of(model, RANKS, "eplb", algorithm="eplb")
    return [linear, eplb, linear if family == "mixtral" else plan_of(model, RANKS, "aurora", order="matched")]


def own_tokens(rank: int) -> torch.Tensor:
    """int64[rank + 1, 5 + rank]"""
    return tokens_of(rank + 1, 5 + rank, seed=rank)


def generated(family: str, plans: list[Plan], rank: int) -> dict:
    """Tokens of a generation in which plans are exchanged, compared with the plain model's, and the moves."""
    options = {"max_new_tokens": WORDS, "do_sample": False}
    plain = model_of(family).generate(own_tokens(rank), **options)
    model, later, step, moves = apply_plan(model_of(family), plans[0]), dict(zip(AT, plans[1:], strict=True)), count(), []

    def adapt(*_: object) -> None:
        if (plan := later.get(next(step))) is not None:
            with Counted(rank) as counted:
                moves.append({"moved": exchange_plan(model, plan)._asdict()})
            moves[-1]["to"] = [counted.to[dst] for dst in range(RANKS)]

    model.register_forward_pre_hook(adapt)
    words = model.generate(own_tokens(rank), **options)
    return {"same": torch.equal(words, plain), "length": words.shape[1] - 5 - rank, "moves": moves}


def trained(family: str, plans: list[Plan], rank: int) -> bool:
    """True if weights, names and gradients of a step are those of a model that was given the last plan at once."""
    models = [apply_plan(model_of(family), plan) for plan in (plans[0], plans[-1])]
    for plan in plans[1:]:
        with torch.inference_mode():
            exchange_plan(models[0], plan)
    for model in models:
        model(own_tokens(rank)).logits.square().mean().backward()
        reduce_gradients(model)
    pairs = list(zip(models[0].named_parameters(), models[1].named_parameters(), strict=True))
    same = [torch.equal(ours, theirs) and torch.equal(ours.grad, theirs.grad) for (_, ours), (_, theirs) in pairs]
    return all(same) and all(ours[0] == theirs[0] and ours[1].is_leaf for ours, theirs in pairs)


def said(exchange: Mapping) -> str:
    try:
        exchange_plan(**exchange)
    except InputError as error:
        return str(error)
    return ""


def refused(plan: Plan, rank: int) -> dict[str, str]:
    """The message of a rank for each exchange that does not fit, and whether anything has changed."""
    model = apply_plan(model_of("mixtral"), even(2))
    before = [*model.parameters()]
    wrong = {
        "layers": even(3),
        "experts": even(2, 12),
        "ranks": even(2, 8, 2),
        "different": even(2, shift=rank % 2),
        "one rank alone": even(2, shift=1) if rank != 2 else even(3),
        "nodes": plan.with_parts(travel={"unit": "node"}),
    }
    messages = {name: said({"model": model, "plan": other}) for name, other in wrong.items()}
    messages["no plan"] = said({"model": model_of("mixtral"), "plan": even(2)})
    with mock.patch("engine.runtime.memory.psutil.virtual_memory", return_value=mock.Mock(available=9_000)):
        messages["memory"] = said({"model": model, "plan": plan})
    messages["changed"] = not all(ours is theirs for ours, theirs in zip(before, model.parameters(), strict=True))
    return messages


def status(name: str) -> int:
    """Bytes of this process by a line of its status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def grown(model: torch.nn.Module) -> int:
    """Most bytes by which this process grows while all experts change places."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # what is freed goes back to the system
    apply_plan(model, even(SIZES["num_hidden_layers"]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    exchange_plan(model, even(SIZES["num_hidden_layers"], shift=1))
    return status("VmHWM") - before


def broken_off(rank: int) -> str:
    """The messages of the ranks that are left when the last one ends while weights move."""
    model = apply_plan(model_of("mixtral"), even(2))
    if rank == RANKS - 1:
        with mock.patch.object(LiveExchange, "pass_on", side_effect=InputError("ends here")):
            return said({"model": model, "plan": even(2, shift=1)})
    return said({"model": model, "plan": even(2, shift=1)})


def run(rank: int, plans: dict[str, list[Plan]], big: torch.nn.Module) -> dict:
    """One rank."""
    return {
        "generated": {family: generated(family, of_family, rank) for family, of_family in plans.items()},
        "trained": trained("gpt_oss", plans["gpt_oss"], rank),
        "refused": refused(plans["mixtral"][1], rank),
        "grown": grown(big),
        "broken off": broken_off(rank),
    }


def main(folder: Path) -> None:
    plans = {family: plans_of(family) for family in ("mixtral", "gpt_oss")}
    big = AutoModelForCausalLM.from_config(config_of("olmoe", **SIZES))
    outcomes = forked(partial(run, plans=plans, big=big), RANKS, folder)
    placements = {family: [plan.placement.model_dump() for plan in of_family] for family, of_family in plans.items()}
    (folder / "outcome-0.json").write_text(json.dumps({"ranks": outcomes, "placements": placements}))


if __name__ == "__main__":
    main(Path(sys.argv[3]))
