"""The launches of the check: every order of one model and of two, Lina's scheduler, training steps under every policy, and a
whole model of transformers. Which kind of event takes how much longer than predicted is a figure, not a fault: a fault is an
outcome that differs, or none."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from engine import formats
from engine.catalogue import gpu
from engine.cluster import Cluster, Node
from engine.costs import Datasheet
from engine.launch.places.devices import Devices
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.instructions import OwnModel
from engine.launch.results.comparison import compare
from engine.launch.results.run import MeasuredPlan
from engine.launch.running.local import run_here, temporary_folder
from engine.model import MoEModel
from engine.plan import Plan, Priority, Reaction
from engine.problem import make_problem
from engine.result import never
from engine.simulate.streams import POLICIES
from engine.systems import TRAINING, run
from engine.systems.base import silent
from engine.training import TrainingStep, balanced_load
from engine.units import seconds, share, signed
from tests.cases.launch_plans import MODES, beside, blocks, coherent, plan_in, plan_with, skewed
from tests.gpu.table import Finding, SkipError, needs

FAR = 0.25
"""Relative difference to its prediction from which a kind of event is named as far off."""
GPU = "H100"
"""The catalogue's type that plans are made for: runs are predicted with costs measured on the ranks."""
LIMIT = 240.0
"""Seconds after which a launch is given up: one that hangs must not keep the others from running."""
WORDS = 1000
"""Tokens that a whole model knows."""
MICRO_OP = 1e6
"""Bytes of a piece of an all-reduce, under policies that cut it."""


@dataclass(frozen=True)
class Sizes:
    """The amount that launches compute. step: the training step, of which the model has the same width"""

    tokens: int
    width: int
    repeats: int
    step: TrainingStep


FULL = Sizes(4096, 1024, 5, TrainingStep(batch=8, sequence_length=128, heads=8, dense_d_ff=2048, vocabulary=5000))
"""Wide enough to give a GPU some work."""


def orders(ranks: int, sizes: Sizes) -> Launch:
    """Every order, and two of them context-coherent."""
    model = _model(ranks, sizes)
    trace, where = skewed(sizes.tokens, model), blocks(model, _gpus(ranks))
    plans = [plan_in(mode, trace, where, model) for mode in MODES]
    plans += [coherent(plans[0]), coherent(plans[-1])]
    return Launch(tuple(plans), trace, model, ranks=ranks, repeats=sizes.repeats)


def two_models(ranks: int, sizes: Sizes) -> Launch:
    """Two models side by side in every order that two can have."""
    model = _model(ranks, sizes)
    other = model.model_copy(update={"name": "other", "experts_per_token": 1, "d_model": sizes.width * 3 // 4})
    trace, second = skewed(sizes.tokens, model), skewed(sizes.tokens // 2, other, padding=0.2)
    where = blocks(model, _gpus(ranks))
    modes = [mode for mode in MODES if mode != "shared"]
    plans = [beside(plan_in(mode, trace, where, model), plan_in(mode, second, where, other)) for mode in modes]
    return Launch(tuple(plans), trace, model, second=(second, other), ranks=ranks, repeats=sizes.repeats)


def schedulers(ranks: int, sizes: Sizes) -> Launch:
    """Blocks of experts, hosted anew for every batch by Lina's scheduler."""
    model = _model(ranks, sizes)
    trace, where = skewed(2 * sizes.tokens, model), blocks(model, _gpus(ranks))
    settings = {"path_length": 1, "top_k": 2, "check_experts": 4, "max_experts_per_device": model.experts}
    plan = plan_with(where, name="Lina", reaction=Reaction(**settings, batch=sizes.tokens))
    return Launch((plan,), trace, model, ranks=ranks, repeats=sizes.repeats)


def policies(ranks: int, sizes: Sizes) -> Launch:
    """A training step in pipelines, its all-reduces under every policy."""
    plan, launch = _step("pipemoe", ranks, sizes)
    priorities = [Priority(policy=policy, micro_op=MICRO_OP) for policy in POLICIES]
    return launch(tuple(plan.model_copy(update={"name": each.policy, "priority": each}) for each in priorities))


def lancet(ranks: int, sizes: Sizes) -> Launch:
    """A training step as Lancet plans it."""
    if find_spec("ortools") is None:
        raise SkipError("this Python lacks ortools, with which Lancet plans")
    plan, launch = _step("lancet", ranks, sizes)
    return launch((plan,))


def own_model(ranks: int, sizes: Sizes) -> Launch:
    """A model of transformers with random weights, prefill and a few tokens, in two orders."""
    if lacking := [name for name in ("transformers", "safetensors") if find_spec(name) is None]:
        raise SkipError(f"this Python lacks {lacking[0]}, with which models are loaded")
    config = {
        **{"model_type": "olmoe", "hidden_size": sizes.width, "intermediate_size": 2 * sizes.width, "num_hidden_layers": 3},
        **{"num_experts": max(8, 2 * ranks), "num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 8},
        **{"vocab_size": WORDS, "max_position_embeddings": 8192, "eos_token_id": None, "torch_dtype": "bfloat16"},
    }
    path = Path(_folder().name) / str(ranks) / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    model = formats.read_model(path)
    trace, where = skewed(sizes.tokens, model), blocks(model, _gpus(ranks))
    plans = tuple(plan_in(mode, trace, where, model) for mode in ("matched", "concurrent"))
    ids = np.random.default_rng(0).integers(1, WORDS, (2 * ranks, max(1, sizes.tokens // (2 * ranks))))
    own = OwnModel(folder=str(path.parent), prompts=ids.tolist(), new_tokens=4)
    return Launch(plans, trace, model, ranks=ranks, repeats=sizes.repeats, own=own)


@cache
def _folder() -> TemporaryDirectory:
    """The folder of configs, which goes with this process."""
    return TemporaryDirectory(prefix="switchyard-gpu-")


CASES: Mapping[str, Callable[[int, Sizes], Launch]] = {
    "one model": orders,
    "two models": two_models,
    "Lina's scheduler": schedulers,
    "training step": policies,
    "training step by Lancet": lancet,
    "your own model": own_model,
}


def _model(ranks: int, sizes: Sizes) -> MoEModel:
    width = {"d_model": sizes.width, "d_ff": 2 * sizes.width, "dtype": "bf16"}
    return MoEModel(name="small", layers=3, experts=max(8, 2 * ranks), experts_per_token=2, **width)


def _gpus(ranks: int) -> int:
    """That a plan is for: one alone would have nothing to send, two can be folded onto one rank."""
    return max(2, ranks)


def _step(system: str, ranks: int, sizes: Sizes) -> tuple[Plan, Callable[[tuple[Plan, ...]], Launch]]:
    """A plan for a training step, and the function that launches such plans."""
    model = _model(ranks, sizes).model_copy(update={"layers": 4, "dense_layers": (0, 2), "dtype": "fp32"})
    node = Node(name="drawn", gpus=(gpu(GPU),) * _gpus(ranks))
    load = balanced_load(model)
    problem = make_problem(load, Cluster(name="drawn", nodes=(node,)), model, Datasheet(), step=sizes.step)
    plan = run(TRAINING[system], problem).result.solution

    def launch(plans: tuple[Plan, ...]) -> Launch:
        return Launch(plans, load, model, ranks=ranks, step=sizes.step, repeats=sizes.repeats)

    return plan, launch


def counts(gpus: int) -> list[int]:
    """With how many of its GPUs a machine is checked: with every number of them up to eight, then with doubled ones and all."""
    doubled = [2**power for power in range(4, gpus.bit_length())]
    return sorted({*range(1, min(gpus, 8) + 1), *doubled, gpus} - {0})


def launched(case: str, ranks: int, backend: str, devices: Devices, sizes: Sizes = FULL) -> list[Finding]:
    """Run a launch of plans; the ranks compare each output with the unplanned computation."""
    prepared = prepare(replace(CASES[case](ranks, sizes), limit=LIMIT), devices)
    instructions = prepared.instructions
    needs(instructions.backend == backend, f"the backend is {instructions.backend}")
    needs(instructions.device == "cuda" or not devices.gpus, "the ranks compute on the CPU")
    with temporary_folder() as folder:
        whole = run_here(prepared, folder, never, silent)
    return [_finding(measured) for measured in whole.runs]


def _finding(measured: MeasuredPlan) -> Finding:
    """The seconds of one plan by kind of event, measured and predicted."""
    laid = compare(measured.predicted, measured.measured)
    kinds = {row.kind: (float(row.predicted), float(row.measured)) for row in laid.by_kind.itertuples()}
    off = {kind: took / foreseen - 1 for kind, (foreseen, took) in kinds.items() if foreseen > 0 and took > 0}
    far = [kind for kind, error in off.items() if abs(error) > FAR]
    text = [
        f"{seconds(laid.measured)}, predicted {seconds(laid.predicted)} ({signed(laid.ratio - 1)})",
        ", ".join(f"{kind} {signed(error)}" for kind, error in off.items()),
        f"differs by {measured.difference.error:.1g}",
    ]
    if far:
        text.insert(2, f"over {share(FAR)}: {', '.join(far)}")
    figures = {"measured": laid.measured, "predicted": laid.predicted, "passes": list(measured.totals), "far": far}
    figures |= {"difference": measured.difference.error, "allowed_difference": measured.difference.allowed}
    figures["kinds"] = {kind: {"predicted": foreseen, "measured": took} for kind, (foreseen, took) in kinds.items()}
    return Finding("; ".join(text), measured.plan.name, figures)
