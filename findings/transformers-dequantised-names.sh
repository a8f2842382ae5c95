#!/usr/bin/env bash
# Version: transformers 5.23.0 with torch 2.13.0, GptOssForCausalLM on a CPU
# Behaviour: A gpt-oss checkpoint in MXFP4 that is loaded with Mxfp4Config(dequantize=True) has its experts in bf16. save_pretrained
# writes these bf16 matrices under the names of the packed ones, gate_up_proj_blocks and down_proj_blocks, and leaves the quantisation
# out of config.json. from_pretrained of that folder does not know the names: it draws the experts at random, says so in its report
# alone, and the logits are other ones. With save_original_format=False the names are the model's and the logits the same.
# Output seen: {'default': ('gate_up_proj_blocks', 'other logits'), 'save_original_format=False': ('gate_up_proj', 'equal logits')}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

torch.manual_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0}
packed = Path("packed")
AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes, eos_token_id=None)).save_pretrained(packed)

# The experts as published checkpoints have them: 4-bit numbers in blocks of 32, and a scale for each block.
tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(packed / "model.safetensors").items()}
for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
    experts, width, out = tensors.pop(name).shape
    tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8)
    tensors[f"{name}_scales"] = torch.randint(120, 126, (experts, out, width // 32), dtype=torch.uint8)
save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
config = json.loads((packed / "config.json").read_text())
kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
(packed / "config.json").write_text(json.dumps(config))

wide = Mxfp4Config(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16, quantization_config=wide).eval()
tokens = torch.randint(1, 96, (1, 7))
seen = {}
with torch.no_grad():
    for how, options in {"default": {}, "save_original_format=False": {"save_original_format": False}}.items():
        model.save_pretrained(how, **options)
        (name,) = (name for name in load_file(f"{how}/model.safetensors") if "layers.0.mlp.experts.gate_up" in name and "bias" not in name)
        again = AutoModelForCausalLM.from_pretrained(how, dtype=torch.bfloat16).eval()
        same = torch.equal(again(tokens).logits, model(tokens).logits)
        seen[how] = name.rpartition(".")[2], "equal logits" if same else "other logits"
print("transformers", transformers.__version__, seen)
assert list(seen.values()) == [("gate_up_proj_blocks", "other logits"), ("gate_up_proj", "equal logits")], seen
END
