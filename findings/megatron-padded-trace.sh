#!/usr/bin/env bash
# Version: Megatron-Core 0.19.2, --moe-routing-trace-path; torch 2.13.0
# Behaviour: The tracer takes a layer's routing map after the capacity factor. Where choices were dropped the map has too few of
# them, and the layer is left out of the trace without a word. Where experts' inputs are padded to the capacity
# (--moe-pad-expert-input-to-capacity) the map has the padded places too; with a factor of 1 they are as many as the choices, so
# that the layer is written, cut into rows of k that belong to other tokens, under "top_indices". Every expert then has as many
# tokens as every other: a trace of a skewed router looks perfectly balanced. Eight tokens choose two of four experts; all of
# them choose expert 0.
# Output seen: dropped to a capacity the trace has [], padded to it rows of other tokens; tokens of experts [8, 3, 3, 2] as
# chosen, [4, 4, 4, 4] in the padded trace.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/pip" download --quiet --no-deps --only-binary :all: --python-version 3.12 -d "$folder" megatron-core==0.19.2
"$folder/venv/bin/python" - "$folder" <<'END'
import ast
import json
import math
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

folder = Path(sys.argv[1])
wheel = zipfile.ZipFile(next(folder.glob("megatron_core-*.whl")))
tracing, moe = ModuleType("router_trace"), "megatron/core/transformer/moe/"
exec(wheel.read(f"{moe}router_trace.py").decode(), tracing.__dict__)
tree = ast.parse(wheel.read(f"{moe}moe_utils.py").decode())
names = ("get_capacity", "apply_router_token_dropping")  # run without the module's imports
tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
for node in tree.body:
    node.returns = None
    for argument in node.args.args:
        argument.annotation = None
space = {"torch": torch, "math": math}
exec(compile(tree, "moe_utils", "exec"), space)

choices = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1], [0, 2], [0, 3], [0, 1], [0, 2]])
chosen = torch.zeros(8, 4, dtype=torch.bool).scatter(1, choices, True)
probs = torch.where(chosen, torch.linspace(0.5, 0.6, 8)[:, None], 0.0)
written = {}
for name, options in (("dropped", {}), ("padded", {"pad_to_capacity": True})):
    final = space["apply_router_token_dropping"](probs, chosen, router_topk=2, capacity_factor=1.0, **options)
    tracer = tracing.RouterTracer(str(folder / name), max_steps=1, rank=0, training_mode=True)
    tracer._record(SimpleNamespace(topk=2), (), final, ("decoder", None, 0))
    tracer.flush()
    lines = (folder / name / "router_trace_rank0.jsonl").read_text().splitlines()
    written[name] = [json.loads(line)["top_indices"] for line in lines]
    print(f"megatron-core 0.19.2, choices {choices.tolist()}, {name} to a capacity factor of 1: the trace has {written[name]}")
(rows,) = written["padded"]
counts = torch.bincount(torch.tensor(rows).flatten(), minlength=4).tolist()
print("tokens of experts, chosen and in the padded trace:", chosen.sum(0).tolist(), counts)
assert written["dropped"] == []
assert rows != choices.tolist() and counts == [4, 4, 4, 4] and chosen.sum(0).tolist() == [8, 3, 3, 2]
END
