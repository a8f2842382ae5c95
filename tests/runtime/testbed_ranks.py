"""The ranks of `test_on_testbed`: `python -m tests.runtime.testbed_ranks 0 1 FOLDER`, with the case in the file that `CASES`
names."""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine.plan import Plan
from engine.routing_recorder import RoutingRecorder
from engine.runtime.apply import apply_plan
from engine.runtime.exchange.links import Tiers
from engine.runtime.moving import exchange_plan
from tests.cases.forks import forked
from tests.cases.tiny_models import config_of, model_of, relative, tokens_of
from tests.runtime.layer_ranks import Counted

WORDS = 20


def moved(rank: int, model: torch.nn.Module, plans: Sequence[Plan], tiers: Tiers) -> list:
    """Each exchange of a plan for the next one."""
    apply_plan(model, plans[0], tiers=tiers)
    return [exchange_plan(model, plan, tiers=tiers)._asdict() for plan in plans[1:]]


def answered(rank: int, family: str, plans: dict[str, Plan], tiers: Tiers) -> dict:
    """The answers of a model of a family under each plan compared with the plain one's, the bytes of tokens that went to each
    rank, and the experts that were chosen."""
    tokens = tokens_of(1 + rank % 3, 5 + rank, seed=rank)
    options = {"max_new_tokens": WORDS, "do_sample": False}
    plain = model_of(family)
    with RoutingRecorder(plain) as recorder, torch.no_grad():
        logits = plain(input_ids=tokens).logits
    outcome = {"experts": recorder.trace(family).experts.tolist()}
    words = plain.generate(tokens, **options)
    for name, plan in plans.items():
        model = apply_plan(model_of(family), plan, tiers=tiers)
        with Counted(rank) as counted, torch.no_grad():
            ours = model(tokens).logits
        same = torch.equal(model.generate(tokens, **options), words)
        to = [counted.to[dst] for dst in range(len(tiers.node))]
        outcome[name] = {"logits": relative(ours, logits), "same words": same, "to": to}
    dist.barrier()
    return outcome


def main(folder: Path) -> None:
    case = json.loads(Path(os.environ["CASES"]).read_text())
    tiers, ranks = Tiers(**case["tiers"]), len(case["tiers"]["node"])
    if "sizes" in case:
        run = partial(moved, model=AutoModelForCausalLM.from_config(config_of("olmoe", **case["sizes"])))
        plans = [Plan.model_validate_json(plan) for plan in case["plans"]]
    else:
        run = partial(answered, family=case["family"])
        plans = {name: Plan.model_validate_json(plan) for name, plan in case["plans"].items()}
    outcomes = forked(partial(run, plans=plans, tiers=tiers), ranks, folder, case["namespaces"])
    (folder / "outcome-0.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[3]))
