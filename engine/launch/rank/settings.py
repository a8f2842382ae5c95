"""Settings of CUDA, NCCL and PyTorch before a rank first uses them, and the number of threads that ranks compute with."""

import os

FOR_NCCL = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Variables that CUDA reads as it starts. A kernel loaded by its first use may first wait for all running ones, also
for one of NCCL's that waits for another rank (CUDA programming guide, "Lazy Loading"). And with more streams than the
default 8 connections, two streams share a queue, in which a kernel that waits for a peer holds up others."""


def settle(backend: str) -> None:
    """Set variables for several communicators on one device, which the user's own replace, and make fp32 fp32. To be
    called before CUDA is used.

    NCCL starts kernels in the order in which the host hands them over: two communicators, as of two models or of a
    step's all-to-alls and all-reduces, deadlock if the device starts them in another order than a peer's. That order
    needs NCCL 2.26 (PyTorch's own is later), and CUDA 12.3 for them to overlap.

    Multiplied in TF32, as NVIDIA's images of PyTorch do by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, fp32 would differ from the
    unplanned computation by more than a plan may, and its time would not be that of fp32. Rounding of bf16 and fp16
    sums is left to PyTorch: so engines run them, and the tolerance covers it.

    Their effect on CUDA and NCCL cannot be tested without a GPU; that they are set, and in time, is tested.
    """
    import torch

    if backend == "nccl":
        for name, value in FOR_NCCL.items():
            os.environ.setdefault(name, value)
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    torch.set_float32_matmul_precision("highest")


def threads(ranks: int = 1) -> int:
    """Threads of each of `ranks` ranks that share this machine's processors: at most OMP_THREAD_LIMIT. PyTorch can be
    told to take more than it gets, and then oneDNN leaves out of its products the part of the missing threads."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    processors = max(1, len(os.sched_getaffinity(0)) // ranks)
    return min(processors, int(limit)) if limit.isdecimal() and int(limit) else processors
