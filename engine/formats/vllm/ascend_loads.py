"""Expert loads as the script of vLLM-Ascend (@182b75e) that makes static placements takes them: a tensor [layer, expert] of
counts in what `torch.save` writes, with nothing beside it."""

from engine.formats.bare_lists import loads_of_table
from engine.formats.format import Format, of_one_file
from engine.formats.glance import Glance
from engine.formats.source import Source
from engine.formats.torch_files import array_of, load
from engine.workload import ExpertLoad

NAME = "torch-loads"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
_PROTOCOL_BYTES = 2


def read_tensor(source: Source) -> ExpertLoad:
    """Loads from number[layer, expert]. Rows of zeros only are dense layers and left out."""
    counts = array_of(source.path, load(source.path), "the tensor")
    if counts.ndim != 2 or counts.dtype.kind not in "iuf" or 0 in counts.shape:
        raise source.fault(f"a tensor of loads is numbers [layers, experts], not {counts.dtype} {list(counts.shape)}")
    return loads_of_table(source, counts, NAME)


def _tells(glance: Glance) -> bool:
    return glance.pickled[_PROTOCOL_BYTES:].startswith(_TENSOR)


FORMATS = (Format(NAME, "a tensor of expert loads", "loads", _tells, of_one_file(read_tensor)),)
