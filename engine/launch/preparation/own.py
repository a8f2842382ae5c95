"""A launch of a person's own model before it runs: plans, folder and texts that fit one another, and the memory of every rank.
Nothing is loaded yet: sizes come from the config and the headers of the weights."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from engine import formats
from engine.errors import InputError
from engine.goal import Goal
from engine.launch.places.devices import Devices
from engine.launch.places.fold import fold_plan
from engine.launch.preparation import settled
from engine.launch.preparation.inference import drawn_links, tiers_of
from engine.launch.preparation.launch import Check, Launch, PreparedLaunch
from engine.launch.preparation.memory import GIB, MIB, RankMemory, memory_checks
from engine.launch.rank.difference import allowed, coarsest
from engine.launch.rank.difference import in_words as tolerance_in_words
from engine.launch.rank.instructions import COMPARED_PASSES, OwnModel, RankInstructions
from engine.plan import together
from engine.runtime.describe import Described, describe
from engine.runtime.fit import not_followed

LIBRARIES = 160 * MIB
"""Bytes of a process that has imported transformers and built a model, in addition to those of a rank of another launch.
Measured with transformers 5.23 on x86-64: 138 MiB."""
AT_WORK = 12.0
"""Vectors of each token that are there at once besides the rows for experts, an estimate."""
UNEVEN = 2.0
"""Rows of the busiest rank over those of the mean one, an estimate: what the texts choose is known when they have run."""


def prepare_own(launch: Launch, devices: Devices) -> PreparedLaunch:
    """Fold the plans of a launch onto its ranks, and check folder, texts and memory. Raises InputError if the launch makes no
    sense."""
    if launch.second is not None or launch.step is not None:
        raise InputError("your own model runs alone and forward; leave out the second model or the training step")
    for plan in launch.plans:
        if plan.goal is not Goal.INFERENCE:
            what = "a training step" if plan.goal is Goal.TRAINING else "two models"
            raise InputError(f"the plan {plan.name} is for {what}; your own model runs under plans for one model's inference")
    gpus, ranks = settled.gpus_of(launch.plans), settled.ranks_of(launch, devices)
    settled.check_passes(launch.repeats, launch.limit)
    folder, on_gpus = Path(launch.own.folder), bool(devices.gpus) and ranks > 0
    model = settled.computed_in(formats.read_model(folder / "config.json"), launch.dtype, on_gpus)
    described = describe(folder, model.dtype)
    for plan in launch.plans:
        described.check(plan)
    _check_texts(launch.own, described)
    plans = tuple(fold_plan(plan, ranks, drawn_links(launch, ranks)) for plan in launch.plans)
    parts = {"plans": plans, "model": model, "tiers": tiers_of(launch, ranks)}
    advice = "take fewer or shorter texts, fewer new tokens, more ranks, or one plan at a time"

    def attempt(compared: bool) -> tuple[RankInstructions, list[Check]]:
        own = launch.own.model_copy(update={"folder": _seen(launch, folder), "compared": compared})
        instructions = settled.instructions_of(launch, devices, ranks, own=own, **parts)
        return instructions, list(memory_checks(instructions, devices, _memory(instructions, described), advice))

    instructions, memory = attempt(launch.own.compared)
    if launch.own.compared and not all(check.passed for check in memory):
        alone = attempt(False)
        if all(check.passed for check in alone[1]):
            instructions, memory = alone
    checks = tuple(_checks(launch, instructions, described, memory, devices, gpus))
    return PreparedLaunch(tuple(launch.plans), instructions, (), launch.limit, checks)


def _check_texts(own: OwnModel, described: Described) -> None:
    """Raise InputError for tokens that the model does not know, and for texts that are too long for it."""
    words, room = described.vocabulary, described.positions
    for number, ids in enumerate(own.prompts, start=1):
        if not ids:
            raise InputError(f"text {number} has no tokens")
        if min(ids) < 0 or max(ids) >= words:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise InputError(f"text {number} has token {wrong}, and the model knows {words:,}")
        if room is not None and len(ids) + own.new_tokens - 1 > room:
            raise InputError(
                f"text {number} has {len(ids):,} tokens, and with {own.new_tokens:,} new ones it is longer than the model's "
                f"{room:,} positions"
            )


def _seen(launch: Launch, folder: Path) -> str:
    """The model's folder as the ranks see it. Raises InputError if they run in a container that does not have it."""
    where, folder = launch.destination, folder.absolute()
    shared = where is not None and folder.is_relative_to(where.shared) and folder != Path(where.shared)
    return where.seen(folder) if where is not None and (where.image or shared) else str(folder)


def _memory(instructions: RankInstructions, described: Described) -> RankMemory:
    """Memory of the fullest rank, with the experts of all plans, which it holds at once; rows and activations are estimates."""
    own, ranks, model = instructions.own, instructions.ranks, instructions.model
    number = model.bytes_per_number
    weights, plain = (
        described.weights.memory(held) for held in (together([plan.placement for plan in instructions.plans]), None)
    )
    batches = [own.batch(rank, ranks) for rank in range(ranks)]
    texts, tokens = max(map(len, batches)), max(len(batch) * max(map(len, batch)) for batch in batches)
    longest = max(max(map(len, batch)) for batch in batches) + own.new_tokens
    rows = UNEVEN * own.computed(ranks) * model.experts_per_token / ranks
    of_row = 6.0 * model.d_model + (model.ffn_matrices + 1) * model.d_ff
    # In numbers: keys and values, the mask of attention, vectors of tokens, rows for experts, and logits.
    cache = texts * longest * described.kept
    at_work = texts * longest**2 + tokens * AT_WORK * model.d_model + rows * of_row
    kept = min(own.new_tokens, COMPARED_PASSES) if own.compared else 0
    logits = texts * described.vocabulary
    device = float(weights.peak.max()) + number * (cache + at_work + logits * (2 + kept))
    compared, wide = 0.0, max(number, 4)
    if own.compared:  # in the place of the planned model
        whole = float(plain.peak[0]) * wide / number + wide * (cache + at_work + tokens * model.experts_per_token * of_row)
        compared = max(0.0, whole + 2 * wide * kept * len(own.prompts) * described.vocabulary - device)
    return RankMemory(
        device=device,
        compared=compared,
        host=LIBRARIES + 64.0 * own.tokens,
        through_host=float(weights.largest),
        staged=2.0 * rows * model.bytes_per_token,
    )


def _checks(
    launch: Launch, instructions: RankInstructions, described: Described, memory: Iterable[Check], devices: Devices, gpus: int
) -> Iterator[Check]:
    own, ranks, model = instructions.own, instructions.ranks, instructions.model
    yield settled.rank_check(instructions, gpus)
    yield settled.backend_check(instructions, devices)
    yield from memory
    held = described.weights.memory(together([plan.placement for plan in instructions.plans])).of_rank / GIB
    least, most = f"{held.min():.2f}", f"{held.max():.2f}"
    each = least if least == most else f"{least} to {most}"
    once = ""
    if len(instructions.plans) > 1:
        once = f", with the experts that a rank holds under any of the {len(instructions.plans)} plans, loaded once"
    yield Check("Weights", True, f"{each} GiB on each rank{once}")
    if described.random:
        text = f"{own.folder} has a config alone: weights are random, so that answers and routing say nothing about the model"
        yield Check("Model", True, text, warning=True)
    else:
        yield Check("Model", True, f"{described.name} from {own.folder}")
    lengths = [len(ids) for ids in own.prompts]
    of = f"{min(lengths):,}" if min(lengths) == max(lengths) else f"{min(lengths):,} to {max(lengths):,}"
    text = f"{len(lengths):,} of {of} tokens, dealt to {ranks} ranks in turn, and {own.new_tokens:,} new tokens of each, "
    text += "chosen greedily whatever ends a text"
    idle = max(0, ranks - len(lengths))
    if padded := own.padded(ranks) - idle:
        text += f"; {padded:,} tokens of padding make those of a rank equally long, and travel like others"
    if idle:
        some = "1 rank has none, and computes" if idle == 1 else f"{idle} ranks have none, and compute"
        text += f"; {some} on a token of any kind"
    each = f" of each of {len(instructions.plans)} plans in turn" if len(instructions.plans) > 1 else ""
    yield Check("Texts", True, f"{text}. {instructions.repeats} timed passes{each} after a warm-up")
    for plan in launch.plans:
        if lines := not_followed(plan):
            yield Check("Not followed", True, f"{plan.name}: {'; '.join(lines)}", warning=True)
    if launch.own.compared and not own.compared:
        text = f"none: rank 0 has no room for all {model.experts} experts of a layer, so no unplanned model runs"
        yield Check("Comparison", True, text, warning=True)
    numbers = f"{model.dtype}. Not compared with the model without a plan"
    if own.compared:
        rounded = max((coarsest(model, plan) for plan in instructions.plans), key=allowed)
        of = tolerance_in_words(rounded, rounded, "the largest logit")
        numbers = f"{model.dtype}. Logits are compared with those of the model without a plan, on the same tokens{of}"
    yield Check("Numbers", True, numbers)
