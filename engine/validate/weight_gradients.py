"""Weight gradients that run under all-to-alls."""

from collections.abc import Sequence

from engine.errors import IllegalError


def check_weight_gradients(
    alltoall: Sequence[float], dw: Sequence[float], allowed: Sequence[Sequence[int]], alltoall_of_dw: Sequence[int]
) -> float:
    """Check that every dW runs where it may and return the seconds of all-to-all beside them (Lancet, section 4.2).

    alltoall, dw: seconds of each; allowed: [dW][all-to-all] 0 or 1; alltoall_of_dw: one all-to-all each, -1 for none.
    """
    if len(alltoall_of_dw) != len(dw):
        raise IllegalError(f"{len(alltoall_of_dw)} weight gradients instead of {len(dw)}")
    beside = [0.0] * len(alltoall)
    for gradient, under in enumerate(alltoall_of_dw):
        if int(under) != under:
            raise IllegalError(f"weight gradient {gradient} runs under all-to-all {under}, which is no whole number")
        if under == -1:
            continue
        if not 0 <= under < len(alltoall):
            raise IllegalError(f"weight gradient {gradient} runs under all-to-all {under}, which does not exist")
        if not allowed[gradient][int(under)]:
            raise IllegalError(
                f"weight gradient {gradient} runs under all-to-all {under}, which it depends on or needs it"
            )
        beside[int(under)] += float(dw[gradient])
    return sum(min(float(alltoall[j]), beside[j]) for j in range(len(alltoall)))
