"""Compares the engines' own code with ours, in a table of Markdown: `make engines`, or `python -m tests.engines ENGINE ...`.

Pinned wheels are downloaded into a temporary folder and read, not installed; modules of theirs run, with all else stood in
for. Nothing of it needs a GPU. Ends with status 1 if a row does not hold.
"""

import importlib
import sys
import tempfile
from pathlib import Path

ENGINES = ("sglang", "sglang_recorder", "vllm", "vllm_ascend", "deepspeed", "lmdeploy", "megatron", "tensorrt_llm")


def main(engines: list[str]) -> int:
    """The exit status, with the table printed. engines: those to compare; none means all."""
    fine = True
    print("| Compared | With | Agreement | Holds |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as there:
        for engine in engines or ENGINES:
            for row in importlib.import_module(f"tests.engines.{engine}").rows(Path(there)):
                print(f"| {row.compared} | {row.package} | {row.agreement} | {'yes' if row.holds else 'NO'} |", flush=True)
                fine = fine and row.holds
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
