"""Dumps as SGLang's recorder writes them, built with `torch.save` alone (srt/eplb/expert_distribution.py)."""

import base64
import struct

import torch

from engine.model import MoEModel

EXTEND, DECODE, MIXED, IDLE, VERIFY = 1, 2, 3, 4, 5


def pass_record(number, rank, counts, key="primary"):
    """Return a record of mode `per_pass`. counts: int[layer][slot] tokens"""
    counted = torch.tensor(counts, dtype=torch.int32)
    return {"forward_pass_id": number, "rank": rank, "gatherer_key": key, "global_physical_count": counted}


def token_record(number, rank, mode, positions, ids, extended=None, misc=None):
    """Return a record of mode `per_token`. ids: int[layer][token][choice], filled up with -1 to the recorder's eight choices"""
    filled = [[list(chosen) + [-1] * (8 - len(chosen)) for chosen in layer] for layer in ids]
    chosen = torch.tensor(filled, dtype=torch.int32).reshape(len(ids), len(positions), 8)
    about = {"forward_pass_id": number, "rank": rank, "gatherer_key": "primary", "forward_mode": mode}
    tokens = {"input_ids": [100 + position for position in positions], "positions": list(positions)}
    more = {"extend_seq_lens": extended, "misc_objects": [] if misc is None else misc}
    return about | tokens | more | {"topk_ids_of_layer": chosen}


def dump(folder, records, slots, rank=0, time="1764000000.25"):
    """Write the file of one rank and return its path. slots: int[layer][slot], the logical expert of every slot"""
    path = folder / f"expert_distribution_recorder_{time}_{rank}.pt"
    torch.save({"records": records, "last_physical_to_logical_map": torch.tensor(slots)}, path)
    return path


def codes(workload):
    """Codes of the reader's findings."""
    return [finding.code for finding in workload.origin.findings]


ROUTED_MODEL = MoEModel(name="small", layers=3, dense_layers=(0,), experts=300, experts_per_token=2, d_model=8, d_ff=8)


# Three tokens of a model with three decoder layers, the first one dense, and k = 2.
ROUTED_IDS = (0, 0, 3, 7, 255, 1, 0, 0, 0, 4, 2, 0, 0, 0, 9, 8, 7, 6)
ROUTED_TEXT = base64.b64encode(struct.pack("<18i", *ROUTED_IDS)).decode()


def generated(text=ROUTED_TEXT, prompt=2, completion=2, **more):
    """An answer of /generate."""
    usage = {"id": "a", "prompt_tokens": prompt, "completion_tokens": completion}
    return {"text": "…", "output_ids": [5, 6], "meta_info": usage | {"routed_experts": text} | more}


COUNTS_CSV = "layer_id,expert_id,count\n1,0,5\n1,2,1\n2,1,6\n"
SMALL = MoEModel(name="small", layers=3, dense_layers=(0,), experts=2, experts_per_token=1, d_model=8, d_ff=8)


def traffic_entry(layer, sent):
    counts = {"num_tokens_per_rank": sent, "num_tokens_per_rdma_rank": [sum(sent)], "num_tokens_per_expert": [1, 2, 3, 4, 5]}
    return {"layer_id": layer} | counts
