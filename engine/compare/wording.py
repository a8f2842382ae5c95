"""A verdict and its reasons in words."""

from collections.abc import Callable
from math import ceil

from engine.compare.evidence import SKEW, Balanced, Decision, Evidence, Thresholds, Word
from engine.compare.held_out import UNKNOWN, Batch
from engine.compare.judge import is_pass
from engine.units import digits, seconds, share, signed, size

Sentence = Callable[[Evidence, Thresholds], str]

WORDS: dict[Word, str] = {"do-it": "do it", "try-it": "try it", "not-now": "not now", "cannot-say": "cannot say yet"}

RULES: dict[str, Sentence] = {
    "same": lambda evidence, limits: "The plan does exactly what is deployed, so there is nothing to win.",
    "memory": lambda evidence, limits: (
        f"It does not fit: {share(evidence.memory)} of the fullest GPU's memory would be taken, and "
        f"{share(limits.memory)} may be. Plan with fewer spare slots."
    ),
    "faults": lambda evidence, limits: f"A recording has errors, and figures made from it would mislead. {evidence.faults[0]}",
    "nothing held out": lambda evidence, limits: (
        "Nothing was held out: there is no recording that the plan has not seen, and none of its own can be cut in time. Give "
        "another recording, or a routing log of a plan whose system can be run again."
    ),
    "few tokens": lambda evidence, limits: _few_tokens(evidence, limits),
    "too little": lambda evidence, limits: (
        f"{_gain(evidence, limits)} That is less than the {share(limits.try_gain)} from which it is worth a try."
    ),
    "noise": lambda evidence, limits: (
        f"{_gain(evidence, limits)} That may as well be nothing; to tell, hold out about "
        f"{_tokens(evidence.tokens_needed(limits.try_gain, limits.confidence))} tokens."
    ),
    "move": lambda evidence, limits: (
        f"{_gain(evidence, limits)} But moving takes longer to pay than the "
        f"{digits(limits.break_even_minutes)} minutes that it may; take the plan along when the server is restarted anyway."
    ),
    "all": lambda evidence, limits: f"{_gain(evidence, limits)} Every threshold is met.",
    "some": lambda evidence, limits: f"{_gain(evidence, limits)} Try it on a part first.",
}
"""By the rule that decided, see `decide`."""


def reasons(evidence: Evidence, decision: Decision, limits: Thresholds) -> tuple[str, ...]:
    """The rule that decided, then everything else that is known, a sentence or two each."""
    sentences = [RULES[decision.rule](evidence, limits)]
    if decision.rule == "some":
        missed = [criterion for criterion in decision.criteria if not criterion.passed]
        for text, unknown in (("Below threshold", False), ("Not known", True)):
            if titles := [criterion.title for criterion in missed if (criterion.value is None) == unknown]:
                sentences.append(f"{text}: {', '.join(titles)}.")
    if evidence.parts:
        sentences += [*_worst(evidence, limits), _persistence(evidence, limits), *_beside(evidence, limits)]
        sentences += [_move(evidence), *_batches(evidence), *_reach(evidence), _unit(evidence)]
    if evidence.balanced is not None:
        sentences.append(balance_in_words(evidence.balanced))
    return tuple(sentences)


def _few_tokens(evidence: Evidence, limits: Thresholds) -> str:
    copies = evidence.tokens_per_expert
    tokens, needed = (count * evidence.tokens_for_each for count in (copies, limits.tokens_per_expert))
    shares = ", or give the counts if these are shares" if copies < 1 else ""
    chance = share(copies**-0.5) if copies > 0 else "any amount"
    return (
        f"{evidence.scarcest} has {digits(tokens)} tokens, {digits(copies)} per expert on average, so that chance alone "
        f"moves its load by {chance}. Record at least {_tokens(needed)} tokens{shares}."
    )


def _gain(evidence: Evidence, limits: Thresholds) -> str:
    low, high = evidence.interval(limits.confidence)
    parts = len(evidence.parts)
    where = f"{parts} held-out parts" if parts > 1 else f"{evidence.parts[0].part}, held out,"
    says = spread_in_words(evidence.spread, (low, high), limits.confidence)
    judged = f" Judged on {evidence.other_phase}, as nothing held out is of the step's phase." if evidence.other_phase else ""
    return f"On {where} its gain over what is deployed is {signed(evidence.gain)} ({says}).{judged}"


def spread_in_words(parts: tuple[float, float] | None, interval: tuple[float, float], confidence: float) -> str:
    """The gains of the held-out parts, lowest to highest, or the interval that their tokens leave, whichever is wider."""
    if parts is not None and parts[1] - parts[0] > interval[1] - interval[0]:
        return f"{signed(parts[0])} to {signed(parts[1])} between recordings"
    return f"{share(confidence)} interval {signed(interval[0])} to {signed(interval[1])}"


def _worst(evidence: Evidence, limits: Thresholds) -> list[str]:
    """The worst part. A single part needs no words beyond the first sentence, unless it is below the threshold."""
    worst = evidence.worst
    if worst.gain < limits.worst_gain:
        return [f"On {worst.part} it {gains(worst.gain)}, and no part should be below {share(limits.worst_gain)}."]
    return [f"The worst part is {worst.part} with {signed(worst.gain)}."] if len(evidence.parts) > 1 else []


def _persistence(evidence: Evidence, limits: Thresholds) -> str:
    if evidence.persistence is None:
        return "How long a plan like this serves cannot be told: " + (
            "a plan made for the held-out parts gains nothing there either."
            if any(part.made_for_it is not None for part in evidence.parts)
            else "its system cannot be run again, and the recording that it was made from is not here."
        )
    fresh = any(part.made_for_it is not None for part in evidence.parts)
    possible = "a plan made for the held-out parts would gain there" if fresh else "it gains on what it was made from"
    if evidence.persistence <= 0:
        return f"Nothing is left of what {possible}: last hour's plan does not serve."
    kept = f"{share(evidence.persistence)} of what {possible}"
    if evidence.persistence < limits.persistence:
        return f"It keeps only {kept}: routing differs, and the plan would have to be made again often."
    return f"It keeps {kept}."


def _reach(evidence: Evidence) -> list[str]:
    """Traffic that no part covers."""
    if all(part.by == "time" for part in evidence.parts):
        return ["No other recording was judged, so this says nothing about other traffic."]
    if any(part.planned_on == UNKNOWN for part in evidence.parts):
        return ["What the plan was made from is not known here, so that all recordings are taken as new to it."]
    return []


def _beside(evidence: Evidence, limits: Thresholds) -> list[str]:
    sentences = []
    if evidence.linear:  # a gain of 0 is the deployed plan itself
        sentences.append(
            f"With no plan at all, experts in contiguous blocks, the gain would be {signed(evidence.linear)}."
            if round(evidence.linear, 3)
            else "No plan at all, experts in contiguous blocks, is as fast as what is deployed."
        )
    if not evidence.replica_bytes:
        return [*sentences, "The plan has no replicas and takes no memory for them."]
    cost = f"{size(evidence.replica_bytes)} of memory in all, up to {size(max(evidence.added_bytes, 0.0))} more on a GPU"
    added = evidence.replica_gain()
    if added is None:
        return [*sentences, f"Its replicas take {cost}; what they add is not known without the recording it was made from."]
    worth = f"add {share(added)} to" if added >= 0 else f"lose {share(-added)} against"
    return [*sentences, f"Its replicas take {cost}, and {worth} the same system without them{_enough(added, limits)}."]


def _batches(evidence: Evidence) -> list[str]:
    """From which batch on the plan pays, and the batch at which it costs most."""
    if not evidence.batches:
        return []
    first, last = evidence.pays_from, evidence.batches[-1]
    worst = min(evidence.batches, key=lambda batch: batch.gain)
    costs = f"; at {worst.sequences} it costs {share(-worst.gain)}" if worst.gain < 0 else ""
    if first is None:
        return [f"Evening out the load does not pay with {_sequences(last)} on a GPU, the most that was tried{costs}."]
    most = f" and {signed(last.gain)} at {last.sequences}" if last is not first else ""
    return [f"Evening out the load pays from {_sequences(first)} on a GPU: {signed(first.gain)}{most}{costs}."]


def _sequences(batch: Batch) -> str:
    return f"{batch.sequences} sequence{'s' if batch.sequences > 1 else ''}"


def _unit(evidence: Evidence) -> str:
    """The unit of the times, and why the gain is not that of the recording that the plan was made from."""
    if not is_pass(evidence.unit):
        return f"Times are of {evidence.unit}."
    counts = sorted({part.tokens for part in evidence.parts})
    tokens = " to ".join(f"{count:,.0f}" for count in dict.fromkeys((counts[0], counts[-1])))
    return (
        f"Times are of {evidence.unit}, with the {tokens} tokens of a held-out part: a pass of more or fewer tokens gains "
        "differently."
    )


def balance_in_words(ceiling: Balanced) -> str:
    """The cost of today's skew, and how much of it a plan gains back."""
    begin = f"With balanced routing a step takes {seconds(ceiling.seconds)}: today's skew costs"
    if ceiling.cost <= SKEW:
        return f"{begin} less than {share(SKEW)}."
    gained = ceiling.recovered
    if gained is None:
        return f"{begin} {share(ceiling.cost)}."
    of_it = f"gets {share(gained)} of it back" if gained >= 0 else f"adds {share(-gained)} to that"
    return f"{begin} {share(ceiling.cost)}, this plan {of_it}."


def _enough(added: float, limits: Thresholds) -> str:
    """A rider on replicas that gain too little for their memory."""
    if added >= limits.replica_gain:
        return ""
    return f"{', too little for that memory' if added >= 0 else ''}: plan without spare slots"


def _move(evidence: Evidence) -> str:
    move = evidence.move
    if not move.copies:
        return "No expert has to move."
    cost = f"{move.copies:,} copies of experts move, {size(move.bytes)} in {seconds(move.seconds)}"
    if move.steps is None:
        return f"{cost}, which is never won back."
    after = break_even(move.steps, evidence.unit)
    return f"{cost}; that pays off after {after}, or {seconds(evidence.minutes * 60)}."


def break_even(steps: float, unit: str) -> str:
    """`12 passes`, `the first step`: a part of one counts as the whole. unit: of `Evidence`"""
    one, many = ("pass", "passes") if is_pass(unit) else ("step", "steps")
    return f"the first {one}" if steps <= 1 else f"{digits(ceil(steps))} {many}"


def gains(value: float) -> str:
    """`gains 4.2 %`, `loses 4.2 %`"""
    return f"{'loses' if value < 0 else 'gains'} {share(abs(value))}"


def _tokens(count: float) -> str:
    """Rounded up to two digits, as it is an estimate."""
    count = ceil(count)
    step = 10 ** max(len(str(count)) - 2, 0)
    return f"{-(-count // step) * step:,}"
