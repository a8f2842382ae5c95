"""Answers and recordings as vLLM and its relatives write them."""

import base64
import struct
from collections.abc import Callable

import numpy as np

META = {"record_type": "eplb_load_meta", "version": 1, "model": "test-model", "num_layers": 2}
META |= {"num_ranks": 2, "num_groups": 1, "num_nodes": 1, "num_redundant_experts": 1}

MAP = [[0, 1, 2, 0], [2, 1, 0, 1]]
MOVED = [[0, 1, 2, 0], [2, 1, 0, 2]]


def stats(step: int, load: list, placed: list = MAP, **more: object) -> dict:
    return {"record_type": "eplb_load_stats", "version": 1, "step": step, "expert_load": load, "p2l_map": placed, **more}


FIRST, SECOND = [[10, 1, 5, 2], [2, 8, 1, 3]], [[1, 0, 0, 4], [0, 0, 7, 5]]


# Three rows of two MoE layers with k = 2: two tokens of a prompt and the first generated one; the second was never forwarded.
ROWS = [[[5, 0], [1, 7]], [[3, 2], [6, 4]], [[0, 1], [2, 5]]]
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


def npy(rows: list, descr: str = "|u1", code: str = "B") -> str:
    """base64 of a `.npy`, put together by hand."""
    array = np.array(rows)
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {array.shape}, }}".encode()
    header += b" " * (118 - len(header) - 1) + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bare(rows, code)
    return base64.b64encode(data).decode()


def bare(rows: list, code: str = "i") -> bytes:
    numbers = np.array(rows).ravel().tolist()
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def answer(value: object, usage: dict | None = USAGE, **more: object) -> dict:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Yes"}, "finish_reason": "stop"}
    about = {"id": "chatcmpl-1", "object": "chat.completion", "usage": usage}
    return about | {"choices": [choice | {"routed_experts": value}]} | more


def forms_of(rows: list) -> dict[str, object]:
    def sized(code: str = "i", encode: Callable = base64.b64encode, **more: object) -> dict:
        return {"shape": list(np.shape(rows)), "data": encode(bare(rows, code)).decode(), **more}

    return {
        "vLLM 0.31, uint8": npy(rows),
        "vLLM 0.31, uint16": npy(rows, "<u2", "H"),
        "lists": rows,
        "with encoding and dtype": sized("h", encoding="base64", dtype="int16"),
        "LightLLM": sized(),
        "prime-rl": sized(encode=base64.b85encode),
        "ATOM's numbers": sized("h"),
        "Dynamo": sized("B", dtype="uint8", start=0),
    }


FORMS = forms_of(ROWS)


def chunk(index: int, value: object, **more: object) -> dict:
    choice = {"index": index, "delta": {"content": "Y"}, "routed_experts": value}
    return {"id": "cmpl-9", "object": "chat.completion.chunk", "choices": [choice], **more}


# Two forward passes: a prompt of three tokens, then one generated token.
ROUTED_AT = [0, 1, 2, 0]
ROUTED = {0: [[5, 1], [2, 0], [7, 3], [4, 6]], 3: [[0, 1], [1, 2], [2, 3], [3, 4]]}


def route_meta(**more: object) -> dict:
    return {"type": "meta", "model_id": "m", "vllm_version": "0.11", "device": "cuda", "seed": None, "top_k": 2} | more


def routes(layer: int, choices: list, idx: list = ROUTED_AT) -> list[dict]:
    line = {"type": "route", "layer": layer, "topk_weights": [0.75, 0.25]}
    return [
        line | {"req_id": f"r{token // 3}", "token_idx": place, "topk_ids": ids}
        for token, (place, ids) in enumerate(zip(idx, choices, strict=True))
    ]
