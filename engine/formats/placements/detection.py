"""How plan files of serving engines are told among all files."""

from engine.formats.arrays import MAX_EXPERTS
from engine.formats.format import Format, Glance
from engine.formats.placements import exflow, sglang, table, tensorrt_llm, vllm


def _tells(glance: Glance) -> bool:
    if glance.is_json:
        return (
            bool({sglang.KEY, vllm.MAPS, vllm.LAYERS} & glance.keys)
            or glance.record.get("record_type") == vllm.MAPPING
            or _is_permutation(glance)
        )
    if not glance.is_text:
        return sglang.KEY.encode() in glance.pickled
    return table.is_table(glance.first_line) or tensorrt_llm.ASSIGNMENTS.encode() in glance.head


def _is_permutation(glance: Glance) -> bool:
    """Whether a list of lists has every expert once in each layer, as Megatron-Core's has; loads never do."""
    if len(glance.shape) != 2 or not 2 <= glance.shape[1] <= MAX_EXPERTS:
        return False
    experts = list(range(glance.shape[1]))
    return all(
        isinstance(row, list)
        and len(row) == len(experts)
        and all(type(id) is int for id in row)
        and sorted(row) == experts
        for row in glance.json
    )


FORMATS = (
    Format("exflow-plan", "an ExFlow placement", "plan", lambda glance: exflow.is_table(glance.first_line)),
    Format("engine-plan", "a plan of a serving engine", "plan", _tells),
)
