"""SGLang's expert locations, for `--init-expert-location` (srt/eplb/expert_location.py): which expert is in every slot.

JSON, or `torch.save` of the same dict: `{"physical_to_logical_map": [[…slots] × decoder layers]}` and no other key. Every
decoder layer has a row; that of a dense layer is never used but must be a full, valid one, and ranks draw copies for it too,
see `engine.placement.dispatch_rules`.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import InputError
from engine.formats.placements.export import Written, even_slots
from engine.formats.placements.plan_source import Deployed, PlanSource, even_placement, expert_ids
from engine.formats.source import quoted
from engine.model import MoEModel
from engine.plan import Placement, Travel
from engine.plan.send_order import Replicas

KEY = "physical_to_logical_map"
DUMPED = "last_physical_to_logical_map"
"""The key of the map that ran last in the recorder's `per_pass` and `per_token` dumps."""


ALGORITHMS = {"nearest-static": "static", "nearest-dynamic": "dynamic", "lp": "lp"}
"""Its algorithms of dispatch (0.5.23), by our rules for copies."""


MODES = {"copies": "low_latency", "node": "normal"}
"""DeepEP's modes in its flags, by the rows that they send."""


def write(placement: Placement, model: MoEModel, name: str, travel: Travel | None = None) -> Written:
    """The map as JSON, or as `.pt` if the file's name ends so: SGLang tells them apart by it.

    Can not carry: different numbers of slots, an expert twice on a GPU, a layout of the MTP layer, and of a plan anything
    but its placement. Raises InputError for such placements and for other extensions.

    travel: the rows and the rule for copies that the plan was made for
    """
    extension = Path(name).suffix
    if extension not in (".json", ".pt"):
        raise InputError(f"{name}: SGLang reads its expert locations by extension; call the file .json or .pt")
    slots = even_slots(placement, model, "SGLang")
    count = slots.shape[1]
    rows = np.tile(np.arange(count) % model.experts, (model.layers, 1))
    rows[list(model.moe_layers)] = slots
    redundant = count - model.experts
    lines = (f"--init-expert-location {name}", f"--ep-num-redundant-experts {redundant}")
    # With an all-to-all backend 0.5.23 takes --tp-size for --ep-size.
    lines += (f"--tp-size {placement.gpus}", f"--ep-size {placement.gpus}")
    notes = ("leave --enable-eplb off: it would move the experts again while the server runs",)
    if redundant:
        replicas = travel.replicas if travel else None
        lines += (f"--ep-dispatch-algorithm {ALGORITHMS.get(replicas, 'dynamic')}",)
        if replicas in ALGORITHMS:
            lines += ("--moe-a2a-backend deepep",)
            lines += (f"--deepep-mode {MODES[travel.unit]}",) if travel.unit in MODES else ()
        notes += (_of_copies(replicas),)
    if extension == ".json":
        return Written(json.dumps({KEY: rows.tolist()}).encode(), lines, notes)
    import torch  # which takes seconds to load

    file = io.BytesIO()
    torch.save({KEY: torch.from_numpy(rows)}, file)
    return Written(file.getvalue(), lines, notes)


def _of_copies(replicas: Replicas | None) -> str:
    """The use of copies that predictions count on, and the settings under which SGLang 0.5.23 makes it."""
    if replicas in ALGORITHMS:
        return (
            f"predictions send a rank's tokens as the dispatch algorithm '{ALGORITHMS[replicas]}' does with an all-to-all "
            "backend, DeepEP or another; without one SGLang refuses 'static' and 'lp', and 'dynamic' shares equally"
        )
    advice = "plan for a rule that it has (--travel copies:::nearest-static)"
    if replicas is not None:
        return f"predictions count on a rule for copies that SGLang does not have; {advice}"
    return (
        "predictions share an expert's tokens equally over its copies, as SGLang does without an all-to-all backend; with one, "
        f"such as DeepEP, every rank sends to its nearest copy, and GPUs are less even: {advice}"
    )


def is_map(content: dict[str, Any]) -> bool:
    return KEY in content or DUMPED in content


def read(source: PlanSource, content: dict[str, Any]) -> Deployed:
    """The rows of the MoE layers. A map that only has those is one of a vLLM plugin's (HYGON, its form without versions)."""
    key = KEY if KEY in content else DUMPED
    rows, model = content[key], source.model
    if not isinstance(rows, list):
        raise source.fault("needs a list with a row of slots for every layer", key)
    if len(rows) == len(model.moe_layers) < model.layers:
        return of_moe_layers(source, rows, "vLLM plugin (HYGON) map")
    others = [other for other in content if other != KEY]
    if key == KEY and others:
        raise source.fault(f"SGLang takes no other key beside {KEY!r}, this has {quoted(others[0])}")
    notes = ()
    if len(rows) == model.layers + 1:
        notes = (f"layer {model.layers}, after the last decoder layer, is the MTP layer's and left out",)
    elif len(rows) != model.layers:
        raise source.fault(
            f"has {len(rows)} rows; {model.name} has {model.layers} decoder layers, dense ones included, and each has one", key
        )
    places = [f"{key}, layer {layer}" for layer in range(model.layers)]
    moe = model.moe_layers
    placement = even_placement(source, [rows[layer] for layer in moe], [places[layer] for layer in moe])
    for layer in model.dense_layers:
        if len(expert_ids(source, rows[layer], places[layer])) != placement.slots[0].sum():
            raise source.fault("this dense layer has another number of slots; SGLang needs a full row of it too", places[layer])
    return Deployed(placement, "SGLang expert locations" if key == KEY else "SGLang recorder dump, its last map", notes)


def of_moe_layers(source: PlanSource, rows: list, kind: str) -> Deployed:
    """A map with a row for every MoE layer and none for the dense ones."""
    placement = even_placement(source, rows, [f"{KEY}, MoE layer {layer}" for layer in range(len(rows))])
    note = f"its {len(rows)} rows are MoE layers; SGLang would ask for all {source.model.layers} decoder layers"
    return Deployed(placement, kind, (note,) if len(rows) < source.model.layers else ())
