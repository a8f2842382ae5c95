"""Adapters: each family's experts cut out of a live block compute as the block's own; a planned model on one process answers as
the plain one; blocks of one's own; families and blocks that cannot be planned."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from engine.plan import Placement, Plan
from engine.runtime import apply
from engine.runtime.adapters import FAMILIES, Generic, adapter_of
from engine.runtime.adapters.stack import ListStack
from engine.runtime.apply import apply_plan
from tests.cases.plans import plan_of as plan_at
from tests.cases.refusals import refusal
from tests.cases.tiny_models import CONFIGS, model_of, relative, tokens_of

MOE_LAYERS = {"qwen2_moe": (0, 2, 3), "deepseek_v2": (1, 2), "deepseek_v3": (1, 2)}
HELD = [5, 2, 7, 0]
COUNTS = [3, 0, 2, 4]


def on_one_gpu(layers: tuple[int, ...], experts: int = 8) -> Plan:
    """A plan on one GPU, with the experts of every layer in another order."""
    rng = np.random.default_rng(0)
    rows = tuple((tuple(rng.permutation(experts).tolist()),) for _ in layers)
    return plan_at(Placement(experts=experts, experts_of_gpu=rows, model_layers=layers))


def test_there_is_a_small_model_of_every_family():
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_cut_out_compute_as_the_blocks_own(family, dtype):
    model = model_of(family).to(dtype)
    block = adapter_of(model).blocks(model)[-1]
    experts, stack = block.module.experts, adapter_of(model).stack(block, HELD)
    rows = torch.randn(9, 32, dtype=dtype, generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor(HELD).repeat_interleave(torch.tensor(COUNTS))
    model.config._experts_implementation = "eager"  # the usual one computes in grouped GEMMs, which take no 64-bit numbers
    wanted = experts(rows, chosen[:, None], torch.ones(9, 1, dtype=dtype))
    assert relative(stack(rows, COUNTS), wanted) < (1e-6 if dtype == torch.float32 else 1e-14)
    assert stack(rows[:0], [0] * 4).shape == (0, 32)
    (stack(rows, COUNTS) ** 2).sum().backward()
    (wanted**2).sum().backward()
    for name, parameter in stack.named_parameters():
        own = getattr(experts, name)
        assert parameter.shape == (4, *own.shape[1:])
        assert relative(parameter.grad, own.grad[HELD]) < 1e-5
        assert parameter.untyped_storage().nbytes() == own.untyped_storage().nbytes() // 2  # a copy: the others can be freed


@pytest.mark.parametrize("family", CONFIGS)
def test_a_planned_model_on_one_process_answers_as_the_plain_one(family):
    model, tokens = model_of(family), tokens_of()
    layers = MOE_LAYERS.get(family, (0, 1))
    with torch.no_grad():
        wanted = model(tokens).logits
    words = model.generate(tokens, max_new_tokens=20, do_sample=False)
    assert apply_plan(model, on_one_gpu(layers)) is model
    with torch.no_grad():
        assert relative(model(tokens).logits, wanted) < 1e-5
    assert torch.equal(model.generate(tokens, max_new_tokens=20, do_sample=False), words)


def test_a_planned_model_is_not_planned_again():
    model = apply_plan(model_of("mixtral"), on_one_gpu((0, 1)))
    assert refusal(apply_plan, model, on_one_gpu((0, 1))).startswith("MixtralForCausalLM runs under a plan already")


def test_generation_waits_for_all_ranks_of_the_job_and_is_refused_for_some_of_them(monkeypatch):
    model, asked = mock.Mock(), mock.Mock()
    model.generate = asked
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    apply._generate_together(model, 4)
    model.generate("tokens", max_new_tokens=3)
    asked.assert_called_once_with("tokens", synced_gpus=True, max_new_tokens=3)
    model.generate = asked
    apply._generate_together(model, 2)
    assert "all 4 ranks of the job are done, and the plan's group has 2 of them" in refusal(model.generate, "tokens")


def test_the_choice_of_experts_matters_in_these_models():
    """Otherwise equal logits would not show that the right experts were computed."""
    for family in CONFIGS:
        model = model_of(family)
        with torch.no_grad():
            wanted = model(tokens_of()).logits
            for block in adapter_of(model).blocks(model):
                for parameter in block.module.experts.parameters():
                    parameter.copy_(parameter.roll(1, dims=0))
            assert relative(model(tokens_of()).logits, wanted) > 0.01, family


def test_parameters_that_do_not_learn_stay_so():
    model = model_of("mixtral")
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    stack = adapter_of(model).stack(adapter_of(model).blocks(model)[0], HELD)
    assert stack.gate_up_proj.requires_grad and not stack.down_proj.requires_grad


# Blocks of one's own.


class Router(nn.Linear):
    """The k likeliest experts and their weights."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, chosen = super().forward(x).softmax(dim=-1).topk(2)
        return chosen, weight


class ListBlock(nn.Module):
    """A block that calls its experts in a loop."""

    def __init__(self, router: type[nn.Linear] = Router) -> None:
        super().__init__()
        self.router = router(16, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Dropout(0.9), nn.Linear(24, 16)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, 16)
        chosen, weight = self.router(tokens) if isinstance(self.router, Router) else by_logits(self, tokens)
        out = torch.zeros_like(tokens)
        for place in range(chosen.shape[1]):
            for expert, module in enumerate(self.experts):
                mine = chosen[:, place] == expert
                out[mine] += weight[mine, place, None] * module(tokens[mine])
        return out.reshape(x.shape)


def by_logits(block: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, chosen = block.router(tokens).topk(3)
    return chosen, weight.softmax(dim=-1)


def own_model(block: type[nn.Module] = ListBlock, **more) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(16, 16), block(**more), block(**more)])}).eval()


def answer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model["layers"]:
        x = x + layer(x)
    return x


@pytest.mark.parametrize(("router", "choose"), [(Router, None), (nn.Linear, by_logits)])
def test_a_list_of_experts(router, choose):
    model = own_model(router=router)
    x = torch.randn(2, 5, 16)
    wanted = answer(model, x)
    apply_plan(model, on_one_gpu((1, 2), 6), adapter=Generic(ListBlock, choose=choose))
    assert relative(answer(model, x), wanted) < 1e-6
    names = [name for name, _ in model.named_parameters()]
    assert "layers.1.experts.experts.0_weight" in names and not any("experts.5" in name for name in names)
    answer(model, x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_stack_of_experts_that_no_family_has():
    model = model_of("qwen3_moe")
    model.config.model_type = "nobody_knows"
    block = type(model.model.layers[0].mlp)
    with torch.no_grad():
        wanted = model(tokens_of()).logits
    assert refusal(apply_plan, model, on_one_gpu((0, 1))).startswith(
        "Qwen3MoeForCausalLM: the family 'nobody_knows' has no adapter"
    )
    assert "gate=…" in refusal(apply_plan, model, on_one_gpu((0, 1)), adapter=Generic(block))
    wrong = Generic(block, gate=nn.functional.silu, outward="w3")
    assert "parameters `gate_up_proj` and `w3`" in refusal(apply_plan, model, on_one_gpu((0, 1)), adapter=wrong)

    def gate(hidden: torch.Tensor) -> torch.Tensor:
        left, right = hidden.chunk(2, dim=-1)
        return nn.functional.silu(left) * right

    apply_plan(model, on_one_gpu((0, 1)), adapter=Generic(block, gate=gate))
    with torch.no_grad():
        assert relative(model(tokens_of()).logits, wanted) < 1e-5


class SharedToo(ListBlock):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)


class Alone(ListBlock):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(16, 16)


class Uneven(ListBlock):
    def __init__(self) -> None:
        super().__init__()
        self.experts[3] = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("block", "needs"),
    [
        (SharedToo, "besides a router and a list of experts the block has shared, which a plan would leave out"),
        (Alone, "an adapter needs `experts` to be a ModuleList"),
        (Uneven, "experts of the class Sequential differ in class or sizes"),
    ],
)
def test_blocks_that_would_compute_something_else_are_refused(block, needs):
    assert needs in refusal(apply_plan, own_model(block), on_one_gpu((1, 2), 6), adapter=Generic(block))


def test_a_router_that_returns_logits_alone_does_not_say_how_to_choose():
    model = own_model(router=nn.Linear)
    apply_plan(model, on_one_gpu((1, 2), 6), adapter=Generic(ListBlock))
    assert "give the adapter choose=…" in refusal(answer, model, torch.randn(2, 5, 16))


class TwoNames(nn.Module):
    """An expert with two parameters, the names of which differ in a dot alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.a_weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.a(x) + self.a_weight


def test_names_of_parameters_stay_apart():
    experts = [TwoNames(), TwoNames()]
    stack, x = ListStack(experts, (1, 0)), torch.randn(5, 4)
    assert len(list(stack.parameters())) == 2
    assert relative(stack(x, [2, 3]), torch.cat([experts[1](x[:2]), experts[0](x[2:])])) < 1e-6
