"""Expert maps of HYGON's vLLM plugin, version 2: a map for every model architecture that runs, the MTP model's apart.
`{"version": 2, "model_maps": {"<architecture>": {"physical_to_logical_map": [[…slots] × MoE layers]}}}`"""

from typing import Any

from engine.formats.placements.plan_source import Deployed, PlanSource, field_of
from engine.formats.placements.sglang import KEY, of_moe_layers
from engine.formats.source import quoted

MAPS = "model_maps"


def read(source: PlanSource, content: dict[str, Any]) -> Deployed:
    """The one map that has as many rows as the model MoE layers; the others are left out."""
    if content.get("version", 2) != 2:
        raise source.fault(f"version {quoted(content['version'])} is not known here, 2 is")
    maps = field_of(source, content, MAPS, dict)
    rows_of = {
        name: field_of(source, about, KEY, list, f"{MAPS}, {quoted(name)}")
        for name, about in maps.items()
        if isinstance(about, dict)
    }
    layers = len(source.model.moe_layers)
    fitting = [name for name, rows in rows_of.items() if len(rows) == layers]
    if len(fitting) != 1:
        has = ", ".join(f"{quoted(name)} with {len(rows)}" for name, rows in list(rows_of.items())[:6]) or "none"
        raise source.fault(
            f"one map with {layers} layers is needed, the MoE layers of {source.model.name}; it has {has}", MAPS
        )
    deployed = of_moe_layers(source, rows_of[fitting[0]], "vLLM plugin (HYGON) map")
    left = tuple(f"the map of {quoted(name)} is left out" for name in list(maps)[:6] if name != fitting[0])
    return Deployed(deployed.placement, deployed.format, left)
