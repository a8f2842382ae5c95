"""Files of `torch.save` (`.pt`): dicts and lists of tensors, numbers, texts and None. No function that a file names is called,
except those that make tensors of stored numbers."""

import pickletools
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from engine.formats.source import MAX_FILE_BYTES, fault

NUMBERS = ("Long", "Int", "Short", "Char", "Byte", "Bool", "Double", "Float", "Half", "BFloat16")
ALLOWED = {*("torch._utils _rebuild_tensor_v2", "collections OrderedDict"), *(f"torch {number}Storage" for number in NUMBERS)}
"""`weights_only` alone lets a file call more than this, for instance for a buffer of any size."""

PROTOCOL = 2
MAX_PICKLE_BYTES = 4 * 1024**2
"""Limit of the structure, which takes a second a megabyte; the numbers of tensors are stored apart from it."""


def load(path: Path, file: IO[bytes] | None = None) -> object:
    """The content of the file, tensors on the CPU; `array_of` gives their numbers. Raises InputError for anything in it but
    tensors, numbers, texts, lists, tuples and dicts, and for files of `torch.save` before version 1.6, which are bare pickles.

    file: the opened file, for one that is not at `path`
    """
    with zipfile.ZipFile(file or path) as archive:
        members = archive.infolist()
        pickles = [member for member in members if member.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise fault(path, "is a zip archive, but not what torch.save writes")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise fault(path, "is compressed, as torch.save never does; load it and save it again")
        if sum(member.file_size for member in members) > MAX_FILE_BYTES:
            raise fault(path, f"would unpack to more than {MAX_FILE_BYTES // 1024**2} MB; record fewer steps")
        if (size := pickles[0].file_size) > MAX_PICKLE_BYTES:
            raise fault(
                path,
                f"{size / 1024**2:.0f} MB of lists beside the tensors, more than the limit of "
                f"{MAX_PICKLE_BYTES // 1024**2} MB; record fewer steps",
            )
        pickled = archive.read(pickles[0])
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "PROTO" and argument != PROTOCOL:
            raise fault(path, f"is pickled by protocol {argument}; torch.save takes {PROTOCOL} where it is not told")
        if operation.name in ("GLOBAL", "INST", "STACK_GLOBAL") and argument not in ALLOWED:
            raise fault(
                path,
                f"holds more than tensors, numbers, texts and lists ({argument or operation.name}); load it where it was made "
                "and save those alone",
            )
    import torch  # which takes seconds to load

    if file is not None:
        file.seek(0)
    try:
        return torch.load(file or path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # on damaged files it raises whatever its own code runs into
        raise fault(path, f"is damaged: its structure cannot be followed ({str(error)[:80] or type(error).__name__})") from None


def array_of(path: Path, value: object, place: str) -> np.ndarray:
    """The numbers of a tensor, bool, integers or floats; raises InputError for anything else, and for a tensor of more numbers
    than are stored, which it shows again and again."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise fault(path, f"must be a tensor, not {type(value).__name__}", place)
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise fault(path, f"{list(value.shape)} has more numbers than are stored", place)
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).detach().numpy()
