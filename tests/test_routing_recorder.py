"""engine/routing_recorder.py against routing recomputed by hand, on tiny randomly initialised models."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.routing_recorder import RoutingRecorder
from tests.cases.refusals import refusal

transformers = pytest.importorskip("transformers")

VOCABULARY = 50
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
COMMON |= {"num_experts_per_tok": 2, "pad_token_id": 0}
LATENT_ATTENTION = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
LATENT_ATTENTION |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "n_routed_experts": 8}
LATENT_ATTENTION |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
FAMILIES = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen2Moe": {"num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": [0]},
    "Olmoe": {"num_experts": 8},
    "GptOss": {"num_local_experts": 8, "head_dim": 8},
    "DeepseekV2": LATENT_ATTENTION,
    "DeepseekV3": LATENT_ATTENTION,
}
DENSE_FIRST = ("Qwen3Moe", "DeepseekV2", "DeepseekV3")


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family]})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def words(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def recomputed(model: nn.Module, passes: list[torch.Tensor], k: int = 2) -> np.ndarray:
    """int64[token, layer, k], ids sorted: top-k of every router's weights applied to its input."""
    gates = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    seen: dict[nn.Module, list[torch.Tensor]] = {gate: [] for gate in gates}
    handles = [gate.register_forward_pre_hook(lambda gate, args: seen[gate].append(args[0])) for gate in gates]
    with torch.no_grad():
        for input_ids in passes:
            model(input_ids=input_ids)
    for handle in handles:
        handle.remove()
    layers = []
    for gate, inputs in seen.items():
        x = torch.cat([part.reshape(-1, part.shape[-1]) for part in inputs])
        layers.append((x @ gate.weight.T + getattr(gate, "bias", 0)).topk(k).indices)
    return torch.stack(layers, dim=1).sort(dim=-1).values.numpy()


def hook_count(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers(family, tmp_path):
    model, passes = build(family), [words(2, 7), words(3, 5, seed=1)]
    before = hook_count(model)
    with RoutingRecorder(model) as recorder, torch.no_grad():
        for input_ids in passes:
            model(input_ids=input_ids)
    assert hook_count(model) == before
    trace = recorder.trace(family)
    dense = int(family in DENSE_FIRST)
    assert trace.experts.dtype == np.int16 and trace.experts.shape == (2 * 7 + 3 * 5, 3 - dense, 2)
    assert trace.num_experts == 8 and len(recorder.routers) == 3 - dense
    np.testing.assert_array_equal(np.sort(trace.experts, axis=-1), recomputed(model, passes))
    np.testing.assert_array_equal(trace.sequence, np.repeat(np.arange(5), [7, 7, 5, 5, 5]))
    assert trace.sequence.dtype == np.int32
    recorder.save(tmp_path / "mine.npz")
    with np.load(tmp_path / "mine.npz") as saved:
        assert sorted(saved) == ["experts", "num_experts", "sequence"] and saved["num_experts"] == 8
        assert saved["experts"].dtype == np.int16
        for name in ("experts", "sequence"):
            np.testing.assert_array_equal(saved[name], getattr(trace, name))


def test_padding_has_no_choice():
    model, input_ids = build("Mixtral"), words(2, 6)
    mask = torch.ones_like(input_ids)
    mask[1, 4:] = 0
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(input_ids=input_ids, attention_mask=mask)
    experts = recorder.trace("padded").experts
    np.testing.assert_array_equal((experts == -1).all(axis=(1, 2)), mask.reshape(-1).numpy() == 0)
    assert (experts[:10] >= 0).all()


def test_text_generation_continues_its_sequences_and_an_older_cache_starts_new_ones():
    model, input_ids = build("Qwen3Moe"), words(2, 4)
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=3, do_sample=False)
        model(input_ids=words(1, 2))
    sequence = recorder.trace("generated").sequence
    np.testing.assert_array_equal(sequence, [0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 2, 2])
    with torch.no_grad():
        past = model(input_ids=words(2, 4), use_cache=True).past_key_values  # from before the recording
        with RoutingRecorder(model) as recorder:
            model(input_ids=words(2, 1), past_key_values=past)
    assert recorder.trace("later").sequence.tolist() == [0, 1]


def test_hooks_go_after_an_exception_and_a_pass_that_fails_leaves_nothing():
    model = build("Mixtral")
    before = hook_count(model)
    with pytest.raises(RuntimeError, match="stop"), RoutingRecorder(model) as recorder:
        model(input_ids=words(1, 3))
        raise RuntimeError("stop")
    assert hook_count(model) == before
    model(input_ids=words(1, 3))
    assert recorder.trace("first").tokens == 3
    net = Net(a=Keeps(), b=nn.Linear(3, 3))
    with RoutingRecorder(net) as recorder, torch.no_grad():
        with pytest.raises(RuntimeError):
            net(torch.randn(4, 8))
        net.layers["b"] = nn.Linear(8, 3)
        net(torch.randn(5, 8))
    assert recorder.trace("second", num_experts=6).tokens == 5


class Keeps(nn.Module):
    """An MoE layer that keeps its choice as an attribute and returns only hidden vectors."""

    def __init__(self, experts: int = 6, k: int = 2) -> None:
        super().__init__()
        self.scores, self.k, self.topk_idx = nn.Linear(8, experts), k, None

    def forward(self, x):
        self.topk_idx = self.scores(x).topk(self.k, dim=-1).indices
        return x * self.topk_idx.sum()


class Returns(nn.Module):
    """A router that returns `answer` of its logits [..., experts] and their top-k indices."""

    def __init__(self, answer, experts: int = 6, k: int = 2) -> None:
        super().__init__()
        self.linear, self.answer, self.k = nn.Linear(8, experts), answer, k

    def forward(self, x):
        logits = self.linear(x)
        return self.answer(logits, logits.topk(self.k, dim=-1).indices)


class Net(nn.Module):
    """Layers that get the same input; their outputs are dropped."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x):
        for layer in self.layers.values():
            layer(x)
        return x


def record(net: nn.Module, x: torch.Tensor, **options) -> RoutingRecorder:
    with RoutingRecorder(net, **options) as recorder, torch.no_grad():
        net(x)
    return recorder


def test_a_kept_attribute_and_logits_alone():
    net, x = Net(a=Keeps(), b=Keeps()), torch.randn(2, 5, 8)
    trace = record(net, x).trace("kept", num_experts=6)
    assert trace.experts.shape == (10, 2, 2)
    np.testing.assert_array_equal(trace.experts[:, 1], net.layers["b"].topk_idx.reshape(10, 2))
    np.testing.assert_array_equal(trace.sequence, np.repeat([0, 1], 5))
    assert "num_experts" in refusal(record(net, x).trace, "kept")
    net, x = Net(gate=nn.Linear(8, 6)), torch.randn(2, 3, 8)
    said = refusal(record(net, x).trace, "logits")
    assert "layers.gate" in said and "k=" in said
    trace = record(net, x, k=3).trace("logits")
    assert trace.num_experts == 6
    np.testing.assert_array_equal(trace.experts[:, 0], net.layers["gate"](x).topk(3).indices.reshape(6, 3))


@pytest.mark.parametrize(
    "answer",
    [
        lambda logits, index: index.to(torch.int32),
        lambda logits, index: (logits, index),
        lambda logits, index: {"weights": logits, "topk_indices": index},
        lambda logits, index: (nn.functional.one_hot(index, 6).sum(dim=-2).bool(), logits),
        lambda logits, index: (logits.sum(), 6, index.T.to(torch.int32), logits.sum(dim=0)),  # [k, token], as DeepSpeed's gate
    ],
)
def test_ways_to_return_a_choice(answer):
    net, x = Net(router=Returns(answer)), torch.randn(4, 8)
    net.layers["router"].num_experts = 6
    trace = record(net, x).trace("returned")
    expected = net.layers["router"].linear(x).topk(2).indices
    np.testing.assert_array_equal(np.sort(trace.experts[:, 0]), expected.sort().values)
    assert trace.sequence is None


def test_a_dropped_token_of_a_one_hot_mask_and_integers_of_other_modules_are_no_choices():
    mask = torch.tensor([[0, 1, 0], [0, 0, 0], [0, 0, 1]])
    router = Returns(lambda logits, index: (mask, logits), experts=3)
    router.num_experts = 3
    assert record(Net(router=router), torch.randn(3, 8)).trace("dropped").experts.ravel().tolist() == [1, -1, 2]
    net = Net(indexer=Returns(lambda logits, index: index), gate=Returns(lambda logits, index: (logits, index)))
    assert record(net, torch.randn(4, 8)).routers == ("layers.gate",)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Keeps()

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=True)


def test_recomputation_is_not_counted_twice():
    net, runs = Checkpointed(), []
    net.layer.register_forward_hook(lambda *_: runs.append(1))
    with RoutingRecorder(net) as recorder:
        net(torch.randn(2, 5, 8, requires_grad=True)).sum().backward()
    assert len(runs) == 2
    assert recorder.trace("trained", num_experts=6).tokens == 10


def test_named_routers():
    net, x = Net(one=Returns(lambda logits, index: index), two=Keeps()), torch.randn(4, 8)
    assert record(net, x).routers == ("layers.two",)
    assert record(net, x, routers=r"one$").routers == ("layers.one",)
    assert "matches no module" in refusal(RoutingRecorder, net, routers="three")
    assert "not a regular expression" in refusal(RoutingRecorder, net, routers="(")


@pytest.mark.parametrize(
    ("layers", "experts", "said"),
    [
        ({"a": nn.Linear(8, 8)}, None, "found no router"),
        ({"a": Keeps(), "b": Keeps(k=3)}, 6, "layers.b has 4 tokens × 3"),
        ({"a": Keeps(), "gate": Returns(lambda logits, index: index[:2])}, 6, "layers.gate has 2 tokens"),
        ({"a": Keeps()}, 2, "only 2 experts"),
        ({"a": Keeps(), "gate": Returns(lambda logits, index: (logits, index), experts=9)}, None, "layers.gate: 9"),
    ],
)
def test_layers_that_make_no_recording(layers, experts, said):
    net = Net(**layers)
    assert "no forward pass" in refusal(RoutingRecorder(net).trace, "none")
    assert said in refusal(record(net, torch.randn(4, 8)).trace, "none", num_experts=experts)
