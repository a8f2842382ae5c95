"""Dumps as SGLang's recorder writes them, built with `torch.save` alone (srt/eplb/expert_distribution.py)."""

import torch

EXTEND, DECODE, MIXED, IDLE, VERIFY = 1, 2, 3, 4, 5


def pass_record(number, rank, counts, key="primary"):
    """One of mode `per_pass`. counts: [layer][slot]"""
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": key,
        "global_physical_count": torch.tensor(counts, dtype=torch.int32),
    }


def token_record(number, rank, mode, positions, ids, extended=None, misc=None):
    """One of mode `per_token`. ids: [layer][token][choice], filled up with -1 to the recorder's eight choices"""
    filled = [[list(chosen) + [-1] * (8 - len(chosen)) for chosen in layer] for layer in ids]
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "input_ids": [100 + position for position in positions],
        "positions": list(positions),
        "extend_seq_lens": extended,
        "forward_mode": mode,
        "topk_ids_of_layer": torch.tensor(filled, dtype=torch.int32).reshape(len(ids), len(positions), 8),
        "misc_objects": [] if misc is None else misc,
    }


def dump(folder, records, slots, rank=0, time="1764000000.25"):
    """The file of one rank. slots: [layer][slot], the logical expert of every slot"""
    path = folder / f"expert_distribution_recorder_{time}_{rank}.pt"
    torch.save({"records": records, "last_physical_to_logical_map": torch.tensor(slots)}, path)
    return path


def codes(workload):
    """Codes of what the reader found."""
    return [finding.code for finding in workload.origin.findings]
