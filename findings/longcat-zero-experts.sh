#!/usr/bin/env bash
# Version: transformers 5.24.0, LongCat-Flash; torch 2.13.0
# Behaviour: Zero-computation experts (`zero_expert_num`) return a token as it is and have no weights. The model nevertheless
# has inward matrices for them: gate_up_proj is made for all choices of the router, down_proj for the computing experts alone.
# With the family's default sizes (28 layers, 512 experts and 256 without computation) a third of the inward numbers, 180 388
# 626 432, belong to nobody: 361 GB in bf16. Whoever counts a model's parameters by building it counts LongCat-Flash's experts a
# third too large.
# Output seen: gate_up_proj (768, 4096, 6144), down_proj (512, 6144, 2048); 180,388,626,432 numbers of 28 layers belong to
# choices without computation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'END'
import torch
import transformers

config = transformers.LongcatFlashConfig(num_layers=1, vocab_size=1000)
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
shape = {name.rsplit(".", 1)[1]: tuple(each.shape) for name, each in model.named_parameters() if ".experts." in name}
print("transformers", transformers.__version__, {"experts": config.n_routed_experts, "zero": config.zero_expert_num}, shape)
assert shape["gate_up_proj"][0] == config.n_routed_experts + config.zero_expert_num == 768
assert shape["down_proj"][0] == config.n_routed_experts == 512
unused = 28 * config.zero_expert_num * shape["gate_up_proj"][1] * shape["gate_up_proj"][2]
print(f"{unused:,} numbers of 28 layers belong to choices without computation")
assert unused == 180_388_626_432
END
