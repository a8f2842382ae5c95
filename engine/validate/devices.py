"""Lina's two questions at inference: how many devices an expert deserves, and which experts a device hosts."""

from collections.abc import Sequence

from engine.errors import IllegalError

RELATIVE = 1e-9


def check_devices(
    experts_of_device: Sequence[Sequence[int]], popularity: Sequence[float], devices: int, max_experts_per_device: int
) -> float:
    """Check experts on devices and return the largest load, an expert's popularity divided equally over its hosts.

    experts_of_device: the experts of every device, at most `max_experts_per_device` and none twice; every expert is
    somewhere. popularity: [expert].
    """
    if len(experts_of_device) != devices:
        raise IllegalError(f"{len(experts_of_device)} devices instead of {devices}")
    hosts = dict.fromkeys(range(len(popularity)), 0)
    for device, held in enumerate(experts_of_device):
        if len(held) > max_experts_per_device:
            raise IllegalError(f"device {device} hosts {len(held)} experts instead of at most {max_experts_per_device}")
        if len(set(held)) < len(held):
            raise IllegalError(f"device {device} hosts an expert twice")
        for expert in held:
            if expert not in hosts:
                raise IllegalError(f"device {device} hosts expert {expert}, which does not exist")
            hosts[expert] += 1
    for expert, count in hosts.items():
        if count == 0:
            raise IllegalError(f"expert {expert} is on no device")
    return max(sum(float(popularity[expert]) / hosts[expert] for expert in held) for held in experts_of_device)


def check_popularity(
    devices_of_expert: Sequence[float],
    train: Sequence[Sequence[int]],
    test_prefix: Sequence[Sequence[int]],
    path_length: int,
    top_k: int,
    layer: int,
    experts: int,
    devices: int,
) -> float:
    """Check n_e of Lina's equation 1, counted up token by token, and return its sum.

    train: [token][layer] expert ids; test_prefix: [token][path], the experts of layers layer - path_length + 1 … layer.
    """
    followers: dict[tuple[int, ...], dict[int, int]] = {}
    overall: dict[int, int] = {}
    for token in train:
        path, following = (
            tuple(int(expert) for expert in token[layer - path_length + 1 : layer + 1]),
            int(token[layer + 1]),
        )
        if following < 0:
            continue
        overall[following] = overall.get(following, 0) + 1
        if min(path) >= 0:
            counts = followers.setdefault(path, {})
            counts[following] = counts.get(following, 0) + 1
    wanted = [0.0] * experts
    for token in test_prefix:
        counts = followers.get(tuple(int(expert) for expert in token), overall)
        likeliest = sorted(counts, key=lambda expert: (-counts[expert], expert))[:top_k]
        for expert in likeliest:
            wanted[expert] += devices * counts[expert] / sum(counts.values()) / len(test_prefix)
    if len(devices_of_expert) != experts:
        raise IllegalError(f"{len(devices_of_expert)} experts instead of {experts}")
    for expert, (claimed, right) in enumerate(zip(devices_of_expert, wanted, strict=True)):
        if abs(claimed - right) > RELATIVE * devices:
            raise IllegalError(f"expert {expert} has n_e = {claimed} instead of {right}")
    return sum(wanted)
