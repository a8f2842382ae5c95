"""A model in a folder before anything is loaded, from its config and the headers of its weights.

transformers has to build it, without numbers. A studio would keep that library and PyTorch, so where they are not there yet
another process looks at the model, answers and ends.
"""

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.errors import InputError, one_line
from engine.parallel.processes import ask, leave_with_parent
from engine.plan import Plan
from engine.runtime.fit import Weights, check_fit
from engine.schema import Frozen


class Described(Frozen):
    """A model in a folder.

    name: of its class
    random: True if the folder has no weights
    vocabulary: tokens that it knows
    positions: most tokens of a sequence; None: any number
    kept: numbers that attention keeps of a token, in all layers
    """

    name: str
    random: bool
    weights: Weights
    vocabulary: int
    positions: int | None
    kept: int

    def check(self, plan: Plan) -> None:
        """Raise InputError unless the plan's layers and experts are the model's."""
        check_fit(plan, self.name, self.weights.layers, self.weights.experts)


def describe(folder: Path, dtype: str) -> Described:
    """The model in a folder, from its config and the headers of its files; of one that has not changed since, the answer of the
    last call. Raises InputError as `load_planned` does for the folder. dtype: number format of the weights, as `fp32`"""
    files = sorted(path for path in folder.glob("*") if path.suffix in (".json", ".safetensors"))
    state = tuple((path.name, (about := path.stat()).st_mtime_ns, about.st_size) for path in files)
    answer = _answer(folder, dtype, state)
    if "error" in answer:
        raise InputError(answer["error"])
    return Described.from_dict(answer, "the model")


@lru_cache(maxsize=8)
def _answer(folder: Path, dtype: str, state: tuple) -> dict[str, Any]:
    """A `Described` as JSON, or an error in its place, which is kept as well. state: of the folder's files"""
    if "transformers" in sys.modules:
        return _said(folder, dtype)
    asked = ask(__name__, str(folder), dtype)
    said = asked.stdout.splitlines()[-1:]
    if asked.returncode or not said:
        raise InputError(f"{folder}: the model could not be looked at: {one_line(asked.stderr[-200:])}")
    return json.loads(said[0])


def _said(folder: Path, dtype: str) -> dict[str, Any]:
    try:
        return describe_here(folder, dtype).model_dump()
    except InputError as error:
        return {"error": str(error)}


def describe_here(folder: Path, dtype: str) -> Described:
    """`describe` in this process."""
    from engine.runtime.experts import TORCH_DTYPE
    from engine.runtime.memory import cache_numbers, weights_of
    from engine.runtime.weights import opened

    checkpoint, family, model, _ = opened(folder, TORCH_DTYPE[dtype])
    config = model.config
    return Described(
        name=type(model).__name__,
        random=checkpoint.empty,
        weights=weights_of(model, family),
        vocabulary=config.vocab_size,
        positions=getattr(config, "max_position_embeddings", None),
        kept=config.num_hidden_layers * cache_numbers(config),
    )


if __name__ == "__main__":
    leave_with_parent()
    print(json.dumps(_said(Path(sys.argv[1]), sys.argv[2])))
