"""TensorRT-LLM: nothing of it runs here, since the package index has a stub of it that fetches the sources from elsewhere."""

import subprocess
import sys
from pathlib import Path

from tests.engines.wheels import Row

TENSORRT_LLM = "tensorrt-llm==1.2.1"


def rows(folder: Path) -> list[Row]:
    """One row, which no longer holds once there is a wheel to compare with. folder: where it would be put"""
    pip, (name, _, version) = [sys.executable, "-m", "pip"], TENSORRT_LLM.partition("==")
    known = subprocess.run([*pip, "index", "versions", name], capture_output=True, text=True, check=False).stdout
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "-d", str(folder)]
    got = subprocess.run([*pip, "download", *options, TENSORRT_LLM], stderr=subprocess.DEVNULL, check=False).returncode == 0
    if version not in known.replace(",", " ").split():
        return [Row("plans, statistics and EPLB", TENSORRT_LLM, "the index does not know it, or is not reached", False)]
    said = "there is a wheel now: compare with it" if got else "not run: the index has a stub without sources"
    return [Row("plans, statistics and EPLB", TENSORRT_LLM, said, not got)]
