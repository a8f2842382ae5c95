"""TensorRT-LLM's static expert placement (`MoeLoadBalancerConfig`, tensorrt_llm/llmapi/llm_args.py): YAML with exactly
`num_slots`, `layer_updates_per_iter` (0: the placement stays) and `initial_global_assignments`, a list of experts by model
layer."""

from pathlib import Path
from typing import Any

from engine.formats.placements.export import Written, even_slots
from engine.formats.placements.plan_source import Deployed, PlanSource, check_number, even_placement, field_of
from engine.formats.source import fault, quoted
from engine.model import MoEModel
from engine.plan import Placement

ASSIGNMENTS = "initial_global_assignments"
FIELDS = ("num_slots", "layer_updates_per_iter", ASSIGNMENTS)

ARCHITECTURES = (
    *("DeepseekV3ForCausalLM", "MixtralForCausalLM", "Llama4ForConditionalGeneration"),
    *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
)
"""`moe_model_arch_list` of tensorrt_llm/_torch/modules/fused_moe/moe_load_balancer.py, release 1.0; later ones have more."""

MAX_YAML_BYTES = 1024**2
"""61 layers of 3000 slots; YAML is read at half a megabyte a second."""
MAX_DEPTH = 3


def write(placement: Placement, model: MoEModel, name: str, mtp: bool) -> Written:
    """The YAML.

    Can not carry: different numbers of slots, an expert twice on a GPU, and of a plan anything but its placement. Raises
    InputError for such placements.

    mtp: with a copy of the last layer's assignment as that of the MTP layer, the layer after the last one
    """
    import yaml

    slots = even_slots(placement, model, "TensorRT-LLM")
    assignments = dict(zip(model.moe_layers, slots.tolist(), strict=True))
    if mtp:
        assignments[model.layers] = slots[-1].tolist()  # a list of its own: YAML would write the same one as an alias
        about_mtp = f"layer {model.layers} is the MTP layer's, a copy of layer {model.moe_layers[-1]}, for want of a recording"
    else:
        about_mtp = f"with MTP (speculative decoding) on, the start fails for lack of layer {model.layers}; add a copy (--mtp)"
    content = dict(zip(FIELDS, (slots.shape[1], 0, assignments), strict=True))
    text = yaml.dump(content, Dumper=yaml.CSafeDumper, default_flow_style=None, sort_keys=False, width=2**20)
    return Written(
        text.encode(),
        ("moe_config:", f"  load_balancer: {name}", "enable_attention_dp: true", f"moe_expert_parallel_size: {placement.gpus}"),
        (
            about_mtp,
            "TensorRT-LLM ignores the file without a word unless attention data parallelism is on, experts are shared by "
            f"more than one GPU and the model's architecture is on its list ({', '.join(ARCHITECTURES)}; newer releases "
            "have more)",
        ),
    )


def parse(path: Path, text: str) -> Any:
    """The mappings, lists and scalars (as text) of a small YAML document; raises InputError. The library's own loaders recurse
    in C at every level of nesting, until the process ends, and take four times as long."""
    import yaml

    if len(text) > MAX_YAML_BYTES:
        raise fault(path, f"is longer than {MAX_YAML_BYTES // 1024} KB, as no placement in YAML is")
    try:
        return _parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}" if mark is not None else ""
        raise fault(path, f"not valid YAML ({getattr(error, 'problem', None) or 'unreadable'})", place) from None
    except ValueError as error:
        raise fault(path, f"is no placement in YAML: {error}") from None


def _parse(text: str) -> Any:
    """As `parse`, but raises YAMLError, and ValueError for YAML that is no placement."""
    import yaml

    stack: list[list] = [[]]
    anchored: dict[str, list] = {}
    anchors: list[str | None] = []
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        match event:
            case yaml.ScalarEvent(tag=None):
                stack[-1].append(event.value)
            case yaml.MappingStartEvent(tag=None) | yaml.SequenceStartEvent(tag=None) if len(stack) <= MAX_DEPTH:
                stack.append([])
                anchors.append(event.anchor)
            case yaml.SequenceEndEvent():
                values, anchor = stack.pop(), anchors.pop()
                stack[-1].append(values)
                if anchor:
                    anchored[anchor] = values
            case yaml.MappingEndEvent():
                values, _ = stack.pop(), anchors.pop()
                if not all(isinstance(key, str) for key in values[::2]):
                    raise ValueError("a key is no plain scalar")
                if len(set(values[::2])) < len(values) // 2:
                    raise ValueError("a key comes twice")
                stack[-1].append(dict(zip(values[::2], values[1::2], strict=True)))
            case yaml.AliasEvent() if event.anchor in anchored:  # one list for several layers
                stack[-1].append(anchored[event.anchor])
            case yaml.NodeEvent():
                raise ValueError("it has nesting, aliases or tags that none has")
    if len(stack[0]) != 1:
        raise ValueError("it must hold one document")
    return stack[0][0]


def read(source: PlanSource, content: Any) -> Deployed:
    """The layers of the model; a further one, of the MTP layer, is left out."""
    if not isinstance(content, dict):
        raise source.fault(f"needs the fields {', '.join(FIELDS)}")
    for field in content:
        if field not in FIELDS:
            raise source.fault(f"TensorRT-LLM knows no field {quoted(field)} here; the fields are {', '.join(FIELDS)}")
    layers = field_of(source, content, ASSIGNMENTS, dict)
    numbered = {_number(source, key, "a layer", ASSIGNMENTS): row for key, row in layers.items()}
    model, moe = source.model, source.model.moe_layers
    for layer in moe:
        if layer not in numbered:
            raise source.fault(
                f"there is no model layer {layer}; {model.name} has the MoE layers {moe[0]} … {moe[-1]}", ASSIGNMENTS
            )
    further = sorted(set(numbered) - set(moe))
    if further and further != [model.layers]:
        raise source.fault(f"layer {further[0]} is no MoE layer of {model.name}, nor its MTP layer", ASSIGNMENTS)
    notes = (f"layer {model.layers} is the MTP layer's and left out",) if further else ()
    if content.get("layer_updates_per_iter", "0") != "0":
        notes += (f"with layer_updates_per_iter {content['layer_updates_per_iter']} it moves on while it runs",)
    places = [f"{ASSIGNMENTS}, layer {layer}" for layer in moe]
    rows = [
        [_number(source, expert, f"slot {slot}", place) for slot, expert in enumerate(row)] if isinstance(row, list) else row
        for row, place in ((numbered[layer], place) for layer, place in zip(moe, places, strict=True))
    ]
    placement = even_placement(source, rows, places)
    counted = {"num_slots": _number(source, content.get("num_slots", ""), "num_slots")}
    check_number(source, counted, "num_slots", len(rows[0]), f"the layers list {len(rows[0])}")
    return Deployed(placement, "TensorRT-LLM placement", notes)


def _number(source: PlanSource, scalar: object, what: str, place: str = "") -> int:
    if isinstance(scalar, str) and scalar.isascii() and scalar.isdigit() and len(scalar) < 10:
        return int(scalar)
    raise source.fault(f"{what} is {quoted(scalar)}, not a whole number of at least 0", place)
