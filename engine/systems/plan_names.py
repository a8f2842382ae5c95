"""Names that tell plans apart: to a name that several have, what differs among them is added."""

from collections import defaultdict
from collections.abc import Mapping

from engine.plan import Plan, Travel
from engine.systems.option_words import in_words

LONGEST = 120
"""Characters of a plan's name."""
AMONG, IN_ID = " · ", 8


def names_of(plans: Mapping[str, Plan], chosen: Mapping[str, str], inputs: Mapping[str, str]) -> dict[str, str]:
    """The name of every plan, by id, none twice.

    chosen: names that a person gave, by id; inputs: recordings, clusters, models, steps and costs in words, by digest
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
    """What a plan was made from and how, in words, by what it is about."""
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
        facets[f"option {option}"] = in_words(option, value, plan)
    facets["travel"] = travel.in_words
    return facets


def _cut(name: str, longest: int = LONGEST) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
