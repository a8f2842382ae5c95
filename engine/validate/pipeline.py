"""The parts of one pipelined MoE layer, walked through one by one (PipeMoE, equations 9-12)."""

from collections.abc import Sequence

from engine.errors import IllegalError


def check_pipeline(
    dispatch: Sequence[float],
    experts: Sequence[float],
    combine: Sequence[float],
    streams: int = 1,
    order: str = "dispatch-first",
) -> float:
    """Seconds from the start of the first dispatch to the end of the last combine; raises IllegalError for no parts.

    dispatch, experts, combine: [part] seconds. streams 2: dispatches have a network of their own and combines another, as
    equations 9-12 read. streams 1: one network, which sends in the order D1 … Dr C1 … Cr ("dispatch-first") or
    D1 D2 C1 D3 C2 … Dr Cr-1 Cr ("interleaved").
    """
    parts = len(dispatch)
    if parts < 1 or len(experts) != parts or len(combine) != parts:
        raise IllegalError(
            f"{parts} dispatches, {len(experts)} expert parts and {len(combine)} combines; wanted as many"
        )
    if order == "interleaved":
        sends = [("D", 0)]
        for part in range(parts):
            sends += [("D", part + 1)] * (part + 1 < parts) + [("C", part)]
    else:
        sends = [("D", part) for part in range(parts)] + [("C", part) for part in range(parts)]
    network = {"D": 0.0, "C": 0.0}
    compute = end = 0.0
    computed = [0.0] * parts
    for kind, part in sends:
        free = network[kind] if streams == 2 else max(network.values())
        if kind == "D":
            network["D"] = free + dispatch[part]
            compute = computed[part] = max(compute, network["D"]) + experts[part]
        else:
            network["C"] = end = max(free, computed[part]) + combine[part]
    return end
