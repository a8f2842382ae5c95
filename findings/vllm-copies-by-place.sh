#!/usr/bin/env bash
# Version: vLLM 0.33.0, --enable-eplb with redundant experts; torch 2.13.0
# Behaviour: A token's place in its rank's batch alone says which copy of an expert it goes to, the same for all its experts:
# its place times a constant, modulo 2^32, modulo the number of copies. In a batch of one token that is the first copy of every
# expert, on every rank and in every step: ranks that decode one sequence each leave all other copies idle, which EPLB counts on
# for an equal share. Of eight tokens that choose an expert four go to the same one of its three copies. With hundreds of tokens
# copies share alike. An expert with two, three and four copies, chosen by all tokens of a rank: the share of the copy with most
# of them, of 1. The wheel has 336 MB. Its kernel is run by its text, with the operations of Triton that it uses stood in for.
# Output seen: share of the busiest of 2, 3 and 4 copies: [1.0, 1.0, 1.0] of one token, [0.5, 0.5, 0.25] of eight, [0.5, 0.344,
# 0.25] of 256.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/pip" download --quiet --no-deps --only-binary :all: -d "$folder" vllm==0.33.0
"$folder/venv/bin/python" - "$folder" <<'END'
import ast
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch

wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("vllm-*.whl")))
tree = ast.parse(wheel.read("vllm/model_executor/layers/fused_moe/router/base_router.py"))
name = "_eplb_map_and_record_i32_kernel"
(kernel,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
kernel.decorator_list = []


class Pointer:
    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, by):
        return Pointer(self.values, self.at + by)


def load(pointer, mask=True, other=0):
    mask = torch.as_tensor(mask)
    return torch.where(mask, pointer.values.flatten()[torch.where(mask, pointer.at, 0)], other)


def store(pointer, values, mask):
    pointer.values[pointer.at[mask]] = values[mask]


def atomic_add(pointer, value, mask):
    pointer.values.index_add_(0, pointer.at[mask], torch.full((int(mask.sum()),), value))


triton = {"arange": torch.arange, "where": torch.where, "maximum": torch.clamp, "int64": torch.int64, "constexpr": None}
triton |= {"load": load, "store": store, "atomic_add": atomic_add, "program_id": lambda axis: 0}
space = {"tl": SimpleNamespace(**triton)}
exec(compile(ast.Module([kernel], []), name, "exec"), space)

copies = torch.tensor([2, 3, 4])  # of experts 0, 1 and 2
slots = torch.tensor([[0, 1, -1, -1], [2, 3, 4, -1], [5, 6, 7, 8]])
found = {}
for tokens in (1, 8, 256):
    chosen, placed, loads = torch.arange(3).repeat(tokens), torch.zeros(3 * tokens, dtype=torch.int64), torch.zeros(9).long()
    given = map(Pointer, (chosen, copies, slots, placed, loads, torch.tensor(True), None))
    space[name](*given, 3, 4, 9, 3 * tokens, 3, HAS_NUM_UNPADDED=False, BLOCK_SIZE=1024)
    assert torch.equal(torch.bincount(placed, minlength=9), loads)
    found[tokens] = [round(float(loads[row[row >= 0]].max()) / tokens, 3) for row in slots]
    print(f"vllm 0.33.0, {tokens} tokens of a rank: share of the busiest of 2, 3 and 4 copies {found[tokens]}")
assert found == {1: [1.0, 1.0, 1.0], 8: [0.5, 0.5, 0.25], 256: [0.5, 0.344, 0.25]}, found
END
