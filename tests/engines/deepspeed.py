"""DeepSpeed: the choices of its gates as our recorder has them, its counts, and gates whose experts were permuted."""

import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import torch

from engine.routing_recorder import RoutingRecorder
from tests.engines.wheels import Row

DEEPSPEED = "deepspeed==0.19.8"
GATES = "deepspeed.moe.sharded_moe"
TOKENS, WIDTH, EXPERTS = 512, 16, 8


def module_of(folder: Path) -> ModuleType:
    """Its gates, from the source package, as the index has no wheel; all other modules of it are stood in for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    subprocess.run([*command, "-d", str(folder), DEEPSPEED], check=True, stderr=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("deepspeed-*.tar.gz"))) as archive:
        name = next(name for name in archive.getnames() if name.endswith(f"/{GATES.replace('.', '/')}.py"))
        source = archive.extractfile(name).read()
    around = ("", ".utils", ".utils.timer", ".utils.bwc", ".comm", ".moe", ".moe.mappings")
    sys.modules |= {f"deepspeed{each}": MagicMock() for each in around}
    module = ModuleType(GATES)
    module.__package__ = "deepspeed.moe"
    exec(compile(source, GATES, "exec"), module.__dict__)
    return module


class Layer(torch.nn.Module):
    """A gate, called as its MoE layer does."""

    def __init__(self, gate: torch.nn.Module) -> None:
        super().__init__()
        self.gate, self.routes = gate, None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.routes = self.gate(tokens.reshape(-1, WIDTH), None, True)
        return tokens


def rows(folder: Path) -> list[Row]:
    """Rows of the table. folder: where the package is put."""
    engine, found = module_of(folder), []
    torch.manual_seed(0)
    tokens, position = torch.randn(4, TOKENS // 4, WIDTH), torch.randperm(EXPERTS)
    for k, options, words in (
        (1, {"drop_tokens": False}, "top-1"),
        (2, {"drop_tokens": False, "top2_2nd_expert_sampling": False}, "top-2, sampling off"),
        (4, {"drop_tokens": False}, "top-4"),
        (2, {"drop_tokens": False}, "top-2, as it is set"),
        (4, {}, "top-4, capacity factor 1"),
    ):
        gate = engine.TopKGate(WIDTH, EXPERTS, k=k, **options).eval()
        chosen, counts, same = [], None, True
        for weight in (gate.wg.weight.data, gate.wg.weight.data[torch.argsort(position)]):
            gate.wg.weight.data, layer = weight, Layer(gate)
            with torch.no_grad(), RoutingRecorder(layer) as recorder:
                layer(tokens)
            experts, routes = recorder.trace(words, EXPERTS).experts[:, 0], layer.routes[3].T.numpy()
            same, counts = same and np.array_equal(experts, routes), layer.routes[6].sum().item()
            chosen.append(np.where(experts < 0, -1, experts if not chosen else torch.argsort(position).numpy()[experts]))
        otherwise = int((np.sort(chosen[0]) != np.sort(chosen[1])).any(axis=1).sum())
        served, sampled = int((chosen[0] >= 0).sum()), k == 2 and len(options) < 2
        said = (
            f"{'alike' if same else 'not alike'}; {counts} counted, {served} kept; permuted: {otherwise} of {TOKENS} otherwise"
        )
        dropped = served < counts == TOKENS * k if "drop_tokens" not in options else served == counts
        found.append(Row(f"choices by our recorder, {words}", DEEPSPEED, said, same and dropped and (otherwise > 0) == sampled))
    return found
