"""Two ranks of Megatron-Core on the CPU, in processes of their own: its router, tracer, layers and dispatcher do the work, and
leave its files and its choices in a folder. `python megatron_ranks.py WHEEL FOLDER RANK`, the wheel unpacked."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint

from engine.routing_recorder import RoutingRecorder

RANKS, LAYERS, DENSE, EXPERTS, K, GROUPS, WIDTH = 2, 4, 1, 16, 4, 4, 32
STEPS, MICRO_BATCHES, TOKENS = 3, 2, 64
GROUPED = {
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_num_groups": GROUPS, "moe_router_group_topk": 2},
}
RUNS = {
    "plain": {},
    "grouped": GROUPED,
    "recomputed": {},
    "replay": {"moe_enable_routing_replay": True, **GROUPED},
    "capacity": {"moe_expert_capacity_factor": 1.5},
    "padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
}
"""Settings of the routers by the name of a run."""


def stand_in() -> None:
    """Stand in for what only a GPU has: a current device, streams, and a collective that takes numbers of tensors."""
    stream, exchange = MagicMock(), distributed.all_to_all_single
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    numbers = {"output_split_sizes", "input_split_sizes"}
    distributed.all_to_all_single = lambda *given, **named: exchange(
        *given, **{name: [int(each) for each in value] if name in numbers else value for name, value in named.items()}
    )
    sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = MagicMock()


class Engine:
    """Megatron-Core's classes, imported once the stand-ins are there."""

    def __init__(self) -> None:
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
        from megatron.core.transformer.moe.router_trace import RouterTracer
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.layer = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
        self.groups, self.config, self.tracer = get_default_pg_collection(), TransformerConfig, RouterTracer
        self.replay, self.action = RouterReplay, RouterReplayAction

    def model(self, further: dict) -> torch.nn.Module:
        """A model of a dense layer, MoE layers and one for MTP, under the names that GPT models have; weights as drawn."""
        config = self.config(
            **{"num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4, "num_moe_experts": EXPERTS},
            **{"moe_router_topk": K, "moe_ffn_hidden_size": 8, "moe_router_load_balancing_type": "none"},
            **{"moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": RANKS},
            **{"use_cpu_initialization": True, "add_bias_linear": False, **further},
        )

        def block(number: int | None, mtp: bool = False) -> torch.nn.Module:
            holder = torch.nn.Module()
            if number:
                holder.mlp = self.layer(config=config, layer_number=number, pg_collection=self.groups, is_mtp_layer=mtp)
                holder.mlp.set_layer_number(number)
            return holder

        model, head = torch.nn.Module(), torch.nn.Module()
        model.decoder, model.mtp = torch.nn.Module(), torch.nn.Module()
        model.decoder.layers = torch.nn.ModuleList(map(block, [None] * DENSE + list(range(DENSE + 1, LAYERS + 1))))
        head.mtp_model_layer = block(None if config.moe_enable_routing_replay else 1, True)
        model.mtp.layers = torch.nn.ModuleList([head])
        self.layers = [layer.mlp for layer in model.decoder.layers[DENSE:]]
        self.drawn = [draw(place) for place in range(len(self.layers))]
        for layer, weights in zip(self.layers, self.drawn, strict=True):
            self.load(layer, weights)
        return model

    def load(self, layer: torch.nn.Module, weights: SimpleNamespace, order: np.ndarray | None = None) -> None:
        """Put weights into a rank's part of a layer. order: int64[position], the expert at each; None: as they are"""
        order = torch.arange(EXPERTS) if order is None else torch.tensor(order)
        layer.router.weight.data.copy_(weights.router[order])
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(weights.bias[order])
        for place, expert in enumerate(order[layer.local_expert_indices].tolist()):
            mlp = layer.experts.local_experts[place]
            mlp.linear_fc1.weight.data.copy_(weights.inward[expert])
            mlp.linear_fc2.weight.data.copy_(weights.outward[expert])


def draw(place: int) -> SimpleNamespace:
    """The weights of a layer, the same on all ranks; skewed, so that a capacity factor has tokens to drop."""
    maker = torch.Generator().manual_seed(place)
    router = torch.randn(EXPERTS, WIDTH, generator=maker) * 0.3 + torch.randn(EXPERTS, 1, generator=maker) * 0.02
    bias = torch.randn(EXPERTS, generator=maker) * 0.1
    inward, outward = (torch.randn(EXPERTS, *shape, generator=maker) * 0.2 for shape in ((8, WIDTH), (WIDTH, 8)))
    return SimpleNamespace(router=router, bias=bias, inward=inward, outward=outward)


def traced(engine: Engine, name: str, folder: Path, rank: int) -> dict[str, np.ndarray]:
    """Trace the steps of a run into a folder of its name; bool[step, micro-batch, layer, token, expert] as its routers chose,
    and of a replay int[step, token, layer, choice] as it was recorded."""
    engine.replay.clear_global_router_replay_instances()
    model, maker = engine.model(RUNS[name]), torch.Generator().manual_seed(100 + rank)
    sidecars = dict.fromkeys(("capture_hidden_states", "capture_logits", "dump_router_weights"), name == "grouped")
    tracer = engine.tracer(str(folder / name), STEPS * MICRO_BATCHES, rank, training_mode=True, **sidecars)
    routers = [layer.router for layer in engine.layers]
    if name == "replay":
        engine.replay.set_global_router_replay_action(engine.action.RECORD)
    else:
        tracer.register_hooks(model)
    chosen, recorded = [], []
    for _ in range(STEPS):
        outputs = []
        for _ in range(MICRO_BATCHES):
            tokens = torch.randn(TOKENS, 1, WIDTH, generator=maker)
            for router in routers:
                again = name == "recomputed"
                outputs.append(checkpoint(router, tokens.requires_grad_(), use_reentrant=True) if again else router(tokens))
            if name == "replay":  # as its text generation hands over the choices of every forward pass
                numbers = [one.layer_number for one in engine.replay.global_router_replay_instances]
                recorded.append(torch.stack(engine.replay.get_recorded_data(), dim=1))
                tracer.record_indices(recorded[-1], layer_ids=numbers)
                tracer.advance_step()
            else:
                model.mtp.layers[0].mtp_model_layer.mlp.router(tokens)
        chosen += [mask for _, mask in outputs]
        if name == "recomputed":
            sum(probs.sum() for probs, _ in outputs).backward()
        if name != "replay":
            tracer.advance_step()
    tracer.flush()
    masks = torch.stack(chosen).reshape(STEPS, MICRO_BATCHES, len(routers), TOKENS, EXPERTS).numpy()
    return {name: masks} | ({"recorded": torch.stack(recorded).numpy()} if recorded else {})


class Routers(torch.nn.Module):
    """The routers of a model's layers, all called with the same tokens."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers, self.chosen = torch.nn.ModuleList(layers), []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.chosen = [layer.router(tokens)[1] for layer in self.layers]
        return tokens


def noted(engine: Engine, rank: int) -> dict[str, np.ndarray]:
    """The choices that a capacity factor left, bool[layer, token, expert], and as our recorder notes them."""
    engine.model({"moe_expert_capacity_factor": 1.0})
    routers = Routers(engine.layers)
    with RoutingRecorder(routers) as recorder:
        routers(torch.randn(TOKENS, 1, WIDTH, generator=torch.Generator().manual_seed(400 + rank)))
    return {"left": torch.stack(routers.chosen).numpy(), "noted": recorder.trace("noted").experts}


def moved(engine: Engine, orders: dict[str, list], rank: int) -> dict[str, np.ndarray]:
    """Outputs and choices of layers with their experts as they are and in other orders.

    orders: position of every expert by the name of an order, [layer][expert]
    """
    tokens, found = torch.randn(TOKENS, 1, WIDTH, generator=torch.Generator().manual_seed(200 + rank)), {}
    for name, positions in orders.items():
        engine.model(GROUPED)
        with torch.no_grad():
            outputs, masks = [], []
            for layer, weights, position in zip(engine.layers, engine.drawn, positions, strict=True):
                engine.load(layer, weights, np.argsort(position))
                outputs.append(layer(tokens)[0])
                masks.append(layer.router(tokens)[1][:, torch.tensor(position)])
        found |= {f"{name}_outputs": torch.stack(outputs).numpy(), f"{name}_chosen": torch.stack(masks).numpy()}
    return found


def dispatched(engine: Engine, rank: int) -> dict[str, np.ndarray]:
    """The tokens of both ranks as its dispatcher sends them out, has them arrive, and hands them to the experts; a token is the
    number 1000 × rank + its place."""
    engine.model({})
    layer, dispatcher = engine.layers[0], engine.layers[0].token_dispatcher
    probs, mask = layer.router(torch.randn(TOKENS, 1, WIDTH, generator=torch.Generator().manual_seed(300 + rank)))
    tokens = (1000 * rank + torch.arange(TOKENS, dtype=torch.float32)).reshape(TOKENS, 1, 1)
    sent = dispatcher.dispatch_preprocess(tokens, mask, probs)
    arrived = dispatcher.token_dispatch(*sent)
    served, _, _ = dispatcher.dispatch_postprocess(*arrived)
    parts = {"sent": sent[0][:, 0], "arrived": arrived[0][:, 0], "served": served[:, 0], "mask": mask}
    return {f"dispatch_{name}": part.detach().numpy() for name, part in parts.items()}


def main(wheel: str, folder: Path, rank: int) -> None:
    sys.path[0] = wheel  # this folder has a module of the same name
    stand_in()
    from megatron.core import parallel_state

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    engine = Engine()
    found = {key: part for name in RUNS for key, part in traced(engine, name, folder, rank).items()}
    found |= (
        moved(engine, json.loads((folder / "orders.json").read_text()), rank) | dispatched(engine, rank) | noted(engine, rank)
    )
    np.savez(folder / f"found{rank}.npz", **found)
    distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
