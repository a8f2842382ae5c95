"""What the traffic writers write, the readers read back."""

import numpy as np
import pytest

from engine.errors import InputError
from engine.formats import read_workload
from engine.formats.writers import write_csv, write_npy_traffic, write_parquet
from engine.workload import TrafficMatrix


@pytest.mark.parametrize(
    ("write", "extension"), [(write_csv, "csv"), (write_parquet, "parquet"), (write_npy_traffic, "npy")]
)
def test_round_trip(tmp_path, write, extension):
    amounts = np.random.default_rng(1).random((3, 5, 5)) * 1e9
    amounts[:, 4, :] = 0
    amounts[:, :, 4] = 0
    matrix = TrafficMatrix("mine", amounts, 512.0)
    path = tmp_path / f"mine.{extension}"
    write(matrix, path)
    assert read_workload(path, bytes_per_token=512.0).digest == matrix.digest


def test_folder_that_does_not_exist(tmp_path):
    matrix = TrafficMatrix("mine", np.zeros((1, 2, 2)), 1.0)
    for write in (write_csv, write_npy_traffic, write_parquet):
        with pytest.raises(InputError, match=r"^out\.x: cannot be"):
            write(matrix, tmp_path / "none" / "out.x")
