#!/usr/bin/env bash
# Version: LMDeploy 0.18.0, with enable_eplb; torch 2.13.0
# Behaviour: The load balancer places experts by their loads only where the number of nodes (ranks over
# LMDEPLOY_EPLB_RANKS_PER_NODE, 8 by default) divides the number of groups (LMDEPLOY_EPLB_NUM_GROUPS, 4 by default): with 1, 2
# or 4 nodes. With any other number (24, 40, 48, 64 ranks and more) it copies the heaviest experts and leaves them all in the
# order of their numbers, the copies behind them on the last ranks, where DeepSeek's EPLB packs them over all ranks. 256
# experts, 64 of them redundant, 64 ranks, the loads of a layer drawn (lognormal); copies of an expert share its tokens alike.
# Output seen: busiest rank over the mean 1.94 and experts in their order; with LMDEPLOY_EPLB_NUM_GROUPS=8 it packs node by
# node, 1.53, and with LMDEPLOY_EPLB_RANKS_PER_NODE=64, all ranks as one node, 1.02.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/pip" download --quiet --no-deps --only-binary :all: -d "$folder" lmdeploy==0.18.0
"$folder/venv/bin/python" - "$folder" <<'END'
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import torch

folder = Path(sys.argv[1])
source = zipfile.ZipFile(next(folder.glob("lmdeploy-*.whl"))).read("lmdeploy/pytorch/nn/eplb.py").decode()
loads = (torch.empty(1, 256).log_normal_(0, 1, generator=torch.Generator().manual_seed(0)) * 1e6).round()
(folder / "loads.json").write_text(json.dumps(loads.int().tolist()))
found = []
for groups, ranks_per_node in ((4, 8), (8, 8), (4, 64)):
    settings = ModuleType("lmdeploy.pytorch.envs")  # its environment variables, LMDEPLOY_ and these names
    settings.eplb_experts_statistic_file = str(folder / "loads.json")
    settings.eplb_num_redundant_experts, settings.eplb_num_groups, settings.eplb_ranks_per_node = 64, groups, ranks_per_node
    engine = ModuleType("lmdeploy.pytorch.nn.eplb")
    sys.modules |= {settings.__name__: settings, engine.__name__: engine}
    exec(source, engine.__dict__)
    slots = engine.EPLBMetadata.init(64, 256, 1).physical_to_logical_map[0]
    in_order = bool((slots[:256] == torch.arange(256)).all())
    share = (loads[0] / torch.bincount(slots, minlength=256))[slots].reshape(64, 5).sum(-1)
    found.append((in_order, round(float(share.max() / share.mean()), 2)))
    print(f"lmdeploy 0.18.0, 64 ranks, {groups} groups, {ranks_per_node} ranks a node: in order {in_order}, busiest {found[-1][1]}")
assert found == [(True, 1.94), (False, 1.53), (False, 1.02)], found
END
