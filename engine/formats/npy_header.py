"""What stands before the numbers in NumPy's `.npy` (numpy.lib.format): a version, then a Python dict of shape and dtype."""

from typing import IO

import numpy as np

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether its first index runs fastest, and dtype of the numbers that `file` is left in front of.

    Raises ValueError for versions after 2.0, which are for names that no plain numbers have, and with what else NumPy raises on
    damaged headers (`PARSER_ERRORS`).
    """
    version = np.lib.format.read_magic(file)
    if version not in _READERS:
        raise ValueError(f".npy version {version[0]}.{version[1]} is not a plain array of numbers")
    try:
        shape, fortran_order, dtype = _READERS[version](file)
    except TypeError:  # a header like {[]: 0}, which NumPy lets Python complain about
        raise ValueError("the header of the .npy is damaged") from None
    if any(
        type(size) is not int or size < 0 for size in shape
    ):  # True is an int to NumPy, until it makes an array of it
        raise ValueError(f"the header of the .npy has a shape {shape}")
    return shape, fortran_order, dtype
