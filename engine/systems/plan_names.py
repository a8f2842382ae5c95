"""Names that tell plans apart: a name that several have is followed by their differences. And options in words."""

from collections import defaultdict
from collections.abc import Callable, Mapping

from engine.plan import Plan, Travel
from engine.systems.options import Value

_WORDS: dict[str, Callable[..., str]] = {
    "algorithm": lambda value: f"{value} algorithm",
    "batch_tokens": lambda value: f"batches of {value:,} recorded tokens",
    "bucket_mb": lambda value: f"{value:g} MB buckets",
    "cap": lambda value: f"at most {value:g} × the mean load",
    "copies": lambda value: f"each token stands for {value:g}",
    "execution": str,
    "gpus": lambda value: f"GPUs {value}" if value == "in order" else f"{value} GPUs",
    "hops": lambda value: f"{value} hops",
    "irregular": lambda value: "real tokens only" if value else "buffers filled to capacity",
    "max_degree": lambda value: f"at most {value} parts per layer",
    "max_experts": lambda value: f"at most {value} experts on a GPU" if value else "experts on a GPU as in the paper",
    "max_moves": lambda value: f"at most {value:,} moves" if value else "any number of moves",
    "max_parts": lambda value: f"at most {value} parts per range",
    "max_range": lambda value: f"ranges of at most {value:,} operators" if value else "ranges of any length",
    "micro_op_mb": lambda value: f"{value:g} MB micro-ops",
    "network_order": lambda value: f"{value} network",
    "order": lambda value: f"{value} order",
    "over": lambda value: f"the {value} of the recordings",
    "packing": lambda value: f"{value} packing",
    "scheduler": lambda value: "with its scheduler" if value else "left as it is",
    "partition": lambda value: "partitioned forward pass" if value else "whole forward pass",
    "path_length": lambda value: f"paths of {value} layer{'s' * (value != 1)}",
    "pipelining": lambda value: "pipelined experts" if value else "experts not pipelined",
    "placement": lambda value: f"{value} placement",
    "policy": lambda value: f"{value} policy",
    "sends": lambda value: f"{value} sends",
    "spare": lambda value: f"spare slots {value}",
    "slots": lambda value: f"{value} slots",
    "stages": lambda value: f"{value} stages",
    "time_limit": lambda value: f"{value:g} s limit",
    "top_k": lambda value: f"the {value} likeliest next experts" if value != 1 else "the likeliest next expert",
    "travel": lambda value: f"tokens travel {value}" if value != "free" else "tokens travel in the best way",
    "weight": lambda value: f"affinity weighs {value:g}",
    "weight_gradients": lambda value: f"{value} weight gradients",
}

LONGEST = 120
"""Characters of a plan's name."""
AMONG, IN_ID = " · ", 8


def in_words(option: str, value: Value, plan: Plan) -> str:
    """An option's value as it is said of a plan that was made with it: "288 slots (32 spare)"."""
    if option == "redundant":
        in_all, experts = plan.provenance.options.get("spare") == "in all", plan.placement.experts
        spare = int(value) if in_all else (int(value) - -experts // plan.placement.gpus) * plan.placement.gpus - experts
        return f"{experts + spare} slots ({spare} spare)" if value else "no spare slots"
    if option in _WORDS:
        return _WORDS[option](value)
    said = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{option.replace('_', ' ')} {said}"


def names_of(plans: Mapping[str, Plan], chosen: Mapping[str, str], inputs: Mapping[str, str]) -> dict[str, str]:
    """The name of every plan, by id, none twice.

    chosen: names that a person gave, by id
    inputs: recordings, clusters, models, steps and costs in words, by digest
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for id, plan in plans.items():
        alike[chosen.get(id, plan.name)].append(id)
    names = {}
    for name, ids in alike.items():
        facets = {id: _facets(plans[id], inputs) for id in ids} if len(ids) > 1 else {ids[0]: {}}
        of_any = list(dict.fromkeys(facet for mine in facets.values() for facet in mine))
        differing = [facet for facet in of_any if len({mine.get(facet, "") for mine in facets.values()}) > 1]
        for id in ids:
            names[id] = _cut(AMONG.join([name, *(mine for facet in differing if (mine := facets[id].get(facet)))]))
    counts: dict[str, int] = defaultdict(int)
    for name in names.values():
        counts[name] += 1
    return {
        id: name if counts[name] == 1 else f"{_cut(name, LONGEST - IN_ID - len(AMONG))}{AMONG}{id[:IN_ID]}"
        for id, name in names.items()
    }


def _facets(plan: Plan, inputs: Mapping[str, str]) -> dict[str, str]:
    """The inputs and options of a plan in words, by their subject."""
    origin, travel = plan.provenance, plan.travel or Travel()
    made_from = {role: inputs[digest] for role, digest in origin.inputs.items() if digest in inputs}
    facets = {}
    for role, word in (("workload", "on"), ("workload_b", "beside"), ("model", "for"), ("step", "step of")):
        if role in made_from:
            facets[role] = f"{word} {made_from[role]}"
    gpus = f"{plan.placement.gpus} GPUs"
    facets["cluster"] = inputs.get(origin.inputs.get("cluster", ""), gpus)
    facets["gpus"] = gpus
    if others := sum(role.startswith("workload_also_") for role in origin.inputs):
        facets["others"] = f"serving {others} more"
    if "cost" in made_from:
        facets["cost"] = f"costs: {made_from['cost']}"
    for option, value in origin.options.items():
        if option == "spare":  # in the words of `redundant`
            continue
        facets[f"option {option}"] = in_words(option, value, plan)
    facets["travel"] = travel.in_words
    return facets


def _cut(name: str, longest: int = LONGEST) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
