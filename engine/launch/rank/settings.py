"""What CUDA, NCCL and PyTorch are told before a rank uses them first.

How many threads ranks compute with.
"""

import os

FOR_NCCL = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Variables that CUDA reads as it starts. A kernel that is loaded by its first use may first wait for all that runs, also for
one of NCCL's that waits for another rank (CUDA programming guide, "Lazy Loading"). And of more streams than the 8 connections
that are the default, two share a queue, in which what waits for a peer holds up what does not."""


def settle(backend: str) -> None:
    """To be called before CUDA is used: settings for several communicators on one device, which the user's own replace, and
    fp32 that is fp32.

    NCCL starts kernels in the order in which the host hands them over: two communicators, as of two models or of a step's
    all-to-alls and all-reduces, deadlock where the device starts them in another order than a peer's. That needs NCCL 2.26
    (PyTorch's own is later), and CUDA 12.3 for them to overlap.

    Multiplied in TF32, as NVIDIA's images of PyTorch have it by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, fp32 would differ from the
    unplanned computation by more than a plan may, and be measured as something that it is not. How sums of bf16 and fp16 are
    rounded is left as PyTorch has it: so engines run them, and the tolerance covers it.

    What CUDA and NCCL make of it cannot be tested without a GPU; that it is said, and said in time, is.
    """
    import torch

    if backend == "nccl":
        for name, value in FOR_NCCL.items():
            os.environ.setdefault(name, value)
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    torch.set_float32_matmul_precision("highest")


def threads(ranks: int = 1) -> int:
    """Of each rank, where so many share this machine's processors: at most as many as OpenMP may have. PyTorch can be told to
    take more than it gets, and then oneDNN leaves out of its products what the missing threads were to compute."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    processors = max(1, len(os.sched_getaffinity(0)) // ranks)
    return min(processors, int(limit)) if limit.isdecimal() and int(limit) else processors
