#!/usr/bin/env bash
# Version: SGLang 0.5.23, --ep-dispatch-algorithm static with an all-to-all backend (its default with DeepEP); torch 2.13.0
# Behaviour: More copies of an expert do not divide its tokens: a rank takes its own copy, else the first of its node, else one
# that it draws for itself. A second copy in a node therefore serves, of that node, its own rank alone. And ranks draw from one
# seeded sequence, each from the place that its own copies left it at, so that the fair division that each of them draws for all
# is not the one that they make. Eight ranks in four nodes of two, equal tokens each; expert 0 has copies on ranks 0, 1 and 2.
# Ranks 0 and 1 keep their own tokens, ranks 2 and 3 use the copy on rank 2, and ranks 4 to 7 draw: 2, 0 and 2 of them in layer
# 1, where 1, 1 and 2 are fair.
# Output seen: ranks that send to copies 0, 1 and 2, by layer: [[2, 2, 4], [3, 1, 4], [2, 2, 4], [2, 2, 4], [3, 2, 3], [2, 2,
# 4]].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" download --quiet --no-deps --only-binary :all: -d "$folder" sglang==0.5.23
"$folder/venv/bin/python" - "$folder" <<'END'
import ast
import random
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch

wheel = next(Path(sys.argv[1]).glob("sglang-*.whl"))
source = zipfile.ZipFile(wheel).read("sglang/srt/eplb/expert_location.py").decode()
tree = ast.parse(source)
# The module's plain functions, without its imports; the settings of a server are stood in for.
tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
for node in tree.body:
    node.returns = None
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
ranks, nodes, experts = 8, 4, 13
moe = SimpleNamespace(moe_a2a_backend="deepep", ep_dispatch_algorithm="static", ep_join_mode="none")
space = {"torch": torch, "random": random, "get_exec": lambda: SimpleNamespace(moe=moe)}
space["get_parallel"] = lambda: SimpleNamespace(ep_size=ranks, nnodes=nodes)
exec(compile(tree, "expert_location", "exec"), space)
space["_prefer_same_node_experts"] = lambda: True
# Rank by rank two slots, the same in six layers: expert 0 on ranks 0, 1 and 2, expert 1 on ranks 4 and 5, the others once.
slots = torch.tensor([[0, 2, 0, 3, 0, 4, 5, 6, 1, 7, 1, 8, 9, 10, 11, 12]] * 6)
shares = [[0] * 3 for _ in slots]
for rank in range(ranks):
    known = space["_compute_logical_to_all_physical_map"](
        physical_to_logical_map=slots, num_logical_experts=experts, ep_size=ranks, moe_ep_rank=rank
    )
    chosen = space["compute_logical_to_rank_dispatch_physical_map"](
        logical_to_all_physical_map=known, ep_size=ranks, num_physical_experts=slots.shape[1], ep_rank=rank
    )
    for layer, share in enumerate(shares):
        share[int(chosen[layer, 0]) // 2] += 1
print("sglang 0.5.23: ranks, of 8, that send expert 0 to the copies on ranks 0, 1 and 2, by layer:", shares)
# Ranks 0 and 1 serve themselves, rank 2 its node; ranks 4 to 7 draw. In layer 1 they draw 2, 0 and 2 between them.
assert shares == [[2, 2, 4], [3, 1, 4], [2, 2, 4], [2, 2, 4], [3, 2, 3], [2, 2, 4]]
END
