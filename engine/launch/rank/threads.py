"""How many threads ranks compute with."""

import os


def threads(ranks: int = 1) -> int:
    """Of each rank, where so many share this machine's processors: at most as many as OpenMP may have. PyTorch can be told to
    take more than it gets, and then oneDNN leaves out of its products what the missing threads were to compute."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    processors = max(1, len(os.sched_getaffinity(0)) // ranks)
    return min(processors, int(limit)) if limit.isdecimal() and int(limit) else processors
