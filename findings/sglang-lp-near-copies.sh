#!/usr/bin/env bash
# Version: SGLang 0.5.23, --ep-dispatch-algorithm lp with a map of experts given; torch 2.13.0
# Behaviour: SGLang's linear programme divides every replicated expert's tokens over all its copies, so that the busiest GPU has
# least to do. But a rank that holds a copy, or has one in its node while others are elsewhere, was left only that one when the
# map was loaded, and sends it everything: the division is made by the other ranks alone, and the busiest GPU has more to do
# than the programme says. Four ranks in one node, equal tokens each: expert 0 has copies on ranks 0 and 1, 0.4 of all tokens;
# rank 0 has 0.2 more, the others have 0.05, 0.2 and 0.15. The programme would leave no rank more than 0.325; rank 0 has 0.3625.
# So it is with DeepEP and any other all-to-all backend; without one SGLang refuses lp. After a rearrangement of its own
# (--enable-eplb) all ranks divide.
# Output seen: parts of all tokens on ranks 0 to 3: [0.362, 0.288, 0.2, 0.15]; as its programme divides them [0.325, 0.325, 0.2,
# 0.15].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" download --quiet --no-deps --only-binary :all: -d "$folder" sglang==0.5.23
"$folder/venv/bin/python" - "$folder" <<'END'
import __future__
import ast
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("sglang-*.whl")))


def module(path, kinds, **around):
    """Functions or classes of a file, without its imports."""
    tree = ast.parse(wheel.read(path))
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    exec(compile(tree, path, "exec", __future__.annotations.compiler_flag, dont_inherit=True), around)
    return SimpleNamespace(**around)


def prepare(equations, wanted, single, counts, of_single, of_replicated, on_gpu, sums):
    # As the header of lp_prep.cuh has it in Python.
    part = counts / counts.sum()
    single[:] = part[of_single]
    wanted[:] = torch.cat([part[of_replicated], -(on_gpu @ single)])
    equations[:, -1] = wanted - sums


def extract(share, point, single, slot_of_single, slot_of_copy, slots):
    # As the header of lp_post.cuh has it in Python.
    of_slot = torch.zeros(len(slot_of_single) + len(slot_of_copy) + 1)
    of_slot[slot_of_copy] = point[: len(slot_of_copy)].clamp(min=0)
    of_slot[slot_of_single] = single
    share[:] = of_slot[slots % len(of_slot)]


reference = module("sglang/test/kernels/lplb.py", ast.FunctionDef, torch=torch)
for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.lplb", "sglang.kernels.ops.lplb.torch_solver"):
    sys.modules[name] = ModuleType(name)
sys.modules["sglang.kernels.ops.lplb.torch_solver"].warmup = lambda *sizes, **more: None
sys.modules["sglang.kernels.ops.lplb"].cuda_solver = SimpleNamespace(
    prep_lp_inputs=prepare,
    extract_log2phy_prob=extract,
    solve_ipm=lambda a, b, c, result: result.copy_(reference.solve_ipm_torch_reference(a, b, c)),
)
settings = SimpleNamespace(moe=SimpleNamespace(moe_a2a_backend="deepep"))
around = {"get_exec": lambda: settings, "get_parallel": lambda: SimpleNamespace(ep_size=4, nnodes=1)}
location = module("sglang/srt/eplb/expert_location.py", ast.FunctionDef, torch=torch, **around)
location._compute_logical_to_all_physical_map.__globals__["_prefer_same_node_experts"] = lambda: True
solver = module("sglang/srt/eplb/lplb_solver.py", ast.ClassDef, torch=torch).LPLBSolver

slots = torch.tensor([0, 1, 0, 2, 3, 4, 5, 6])  # two a rank
tokens = torch.tensor([0.4, 0.2, 0.05, 0.1, 0.1, 0.1, 0.05])
served, divided = torch.zeros(4), torch.zeros(4)
for rank in range(4):
    known = location._compute_logical_to_all_physical_map(slots[None], len(tokens), 4, rank)[0]
    made = solver(slots, known, 4, None, (known >= 0).sum(dim=1))
    share = made._solve(tokens)
    share = share / share.sum(dim=1, keepdim=True)
    for expert, copies in enumerate(known.tolist()):
        for place, slot in enumerate(copies):
            if slot >= 0:
                served[slot // 2] += tokens[expert] / 4 * share[expert, place]
    divided = made.B1 @ made._t1
    divided[made.phy_replicated // 2] += made._x[: made.num_red_phy]
    parts = {slot // 2: round(float(part), 3) for slot, part in zip(known[0].tolist(), share[0]) if slot >= 0}
    print("rank", rank, "sends expert 0 to", parts)
print("sglang 0.5.23, lp: parts of all tokens on ranks 0 to 3:", [round(float(part), 3) for part in served])
print("as its programme divides them:", [round(float(part), 3) for part in divided])
for found, stated in ((divided, (0.325, 0.325, 0.2, 0.15)), (served, (0.3625, 0.2875, 0.2, 0.15))):
    assert torch.allclose(found, torch.tensor(stated), atol=1e-3)
END
