"""What the options that a plan was made with mean, in words."""

from collections.abc import Callable

from engine.plan import Plan
from engine.systems.options import Value

_WORDS: dict[str, Callable[..., str]] = {
    "algorithm": lambda value: f"{value} algorithm",
    "batch_tokens": lambda value: f"batches of {value:,} recorded tokens",
    "bucket_mb": lambda value: f"{value:g} MB buckets",
    "cap": lambda value: f"at most {value:g} × the mean load",
    "copies": lambda value: f"each token stands for {value:g}",
    "execution": str,
    "gpus": lambda value: f"GPUs {value}" if value == "in order" else f"{value} GPUs",
    "hops": lambda value: f"{value} hops",
    "irregular": lambda value: "real tokens only" if value else "buffers filled to capacity",
    "max_degree": lambda value: f"at most {value} parts per layer",
    "max_experts": lambda value: f"at most {value} experts on a GPU" if value else "experts on a GPU as in the paper",
    "max_moves": lambda value: f"at most {value:,} moves" if value else "any number of moves",
    "max_parts": lambda value: f"at most {value} parts per range",
    "max_range": lambda value: f"ranges of at most {value:,} operators" if value else "ranges of any length",
    "micro_op_mb": lambda value: f"{value:g} MB micro-ops",
    "network_order": lambda value: f"{value} network",
    "order": lambda value: f"{value} order",
    "over": lambda value: f"the {value} of the recordings",
    "packing": lambda value: f"{value} packing",
    "partition": lambda value: "partitioned forward pass" if value else "whole forward pass",
    "path_length": lambda value: f"paths of {value} layer{'s' * (value != 1)}",
    "pipelining": lambda value: "pipelined experts" if value else "experts not pipelined",
    "placement": lambda value: f"{value} placement",
    "policy": lambda value: f"{value} policy",
    "slots": lambda value: f"{value} slots",
    "stages": lambda value: f"{value} stages",
    "time_limit": lambda value: f"{value:g} s limit",
    "top_k": lambda value: f"the {value} likeliest next experts" if value != 1 else "the likeliest next expert",
    "weight": lambda value: f"affinity weighs {value:g}",
    "weight_gradients": lambda value: f"{value} weight gradients",
}


def in_words(option: str, value: Value, plan: Plan) -> str:
    """An option's value as it is said of a plan that was made with it: "288 slots (32 spare)"."""
    if option == "redundant":
        spare = int(value) * plan.placement.gpus
        return f"{plan.placement.experts + spare} slots ({spare} spare)" if value else "no spare slots"
    if option in _WORDS:
        return _WORDS[option](value)
    said = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{option.replace('_', ' ')} {said}"
