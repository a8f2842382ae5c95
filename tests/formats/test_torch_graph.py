"""The operator graph of a module: against the transformer graph of the same sizes and torch's own counter of FLOPs."""

import importlib
from collections import Counter
from functools import cache

import networkx as nx
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from engine.errors import InputError
from engine.formats.torch_graph import layer_in_path, read_module
from engine.model import MoEModel
from engine.overlap.operator_graph import Operator, OperatorGraph
from engine.overlap.transformer import transformer_step
from engine.training import TrainingStep

LAYERS, WIDTH, HEADS, INNER, EXPERTS, VOCABULARY, BATCH, LENGTH = 2, 32, 4, 48, 4, 90, 2, 16
TOKENS = BATCH * LENGTH

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec:FutureWarning"),
    pytest.mark.slow,
]  # torch, about torch itself


class Attention(nn.Module):
    def __init__(self, fused: bool = True):
        super().__init__()
        self.fused = fused
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (projected.view(batch, length, HEADS, -1).transpose(1, 2) for projected in self.qkv(x).chunk(3, -1))
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.full((length, length), -torch.inf).triu(1)
            y = (q @ k.transpose(-1, -2) / (width / HEADS) ** 0.5 + mask).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Experts(nn.Module):
    def __init__(self, experts: int = EXPERTS):
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, WIDTH, INNER)),
            nn.Parameter(torch.randn(experts, INNER, WIDTH)),
        )

    def forward(self, x):
        return torch.einsum("ecf,efd->ecd", functional.gelu(torch.einsum("ecd,edf->ecf", x, self.up)), self.down)


class MoE(nn.Module):
    """GShard's dense dispatch with a capacity of a fair share."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def run(self, buffer):
        return self.experts(buffer)

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        capacity = len(tokens) // EXPERTS
        weight, choice = self.gate(tokens).softmax(-1).max(-1)
        chosen = functional.one_hot(choice, EXPERTS)
        place = ((chosen.cumsum(0) * chosen).sum(-1) - 1).clamp(max=capacity)
        slot = functional.one_hot(place, capacity + 1)[:, :capacity]
        mask = chosen[:, :, None].to(x.dtype) * slot[:, None, :].to(x.dtype)
        output = self.run(torch.einsum("sec,sd->ecd", mask, tokens))
        return torch.einsum("sec,ecd->sd", mask * weight[:, None, None], output).view(x.shape)


class ParallelMoE(MoE):
    """One of four ranks, with the all-to-alls in the module."""

    def __init__(self):
        super().__init__()
        self.experts = Experts(EXPERTS // 4)

    def run(self, buffer):
        buffer = collectives.all_to_all_single_autograd(buffer, None, None, dist.group.WORLD)
        return collectives.all_to_all_single_autograd(
            self.experts(buffer.reshape(1, -1, WIDTH)).view_as(buffer), None, None, dist.group.WORLD
        )


class Loop(nn.Module):
    """Experts one after the other, each with the tokens that chose it: shapes that depend on the data."""

    def __init__(self, width: int = WIDTH, inner: int = INNER):
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)
        pairs = (nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(EXPERTS))
        self.experts = nn.ModuleList(pairs)

    def forward(self, x):
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = torch.where(choice == number)[0]
            out.index_add_(0, own, expert(x[own]) * weight[own, None])
        return out


class Block(nn.Module):
    def __init__(self, fused: bool = True):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention(fused)
        self.ln_2, self.moe = nn.LayerNorm(WIDTH), MoE()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.moe(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, tied: bool = False, fused: bool = True):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids, labels):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), labels.flatten())


IDS = torch.zeros(BATCH, LENGTH, dtype=torch.long)


@cache
def read(tied: bool = False, fused: bool = True, gpus: int = 2) -> OperatorGraph:
    return read_module(GPT(tied, fused), (IDS, IDS), gpus=gpus)


def transformer(gpus: int = 2, tied: bool = False) -> OperatorGraph:
    model = MoEModel(
        name="GPT",
        layers=LAYERS,
        experts=EXPERTS,
        experts_per_token=1,
        d_model=WIDTH,
        d_ff=INNER,
        ffn_matrices=2,
        dtype="fp32",
    )
    step = TrainingStep(
        batch=BATCH, sequence_length=LENGTH, heads=HEADS, dense_d_ff=1, vocabulary=VOCABULARY, tied_embeddings=tied
    )
    return transformer_step(model, step, gpus)


def flops(operators) -> int:
    return sum(2 * gemm.count * gemm.m * gemm.n * gemm.k for operator in operators for gemm in operator.gemms)


def by_kind(graph: OperatorGraph, *phases) -> Counter:
    flops_of_kind = Counter()
    for operator in graph.of_phase(*phases):
        flops_of_kind[operator.kind] += flops([operator])
    return +flops_of_kind


def is_mask(operator: Operator) -> bool:
    """The dense products with one-hot masks, which the transformer graph does not have."""
    return operator.name.endswith((".encode", ".aggregate"))


def of_kind(graph: OperatorGraph, kind: str, phase: str = "forward") -> list[Operator]:
    return [operator for operator in graph.of_phase(phase) if operator.kind == kind]


def needs(graph: OperatorGraph, name: str) -> dict[str, bool]:
    return {dependency.before: dependency.gradient for dependency in graph.dependencies if dependency.after == name}


@pytest.mark.parametrize("gpus", [2, 4])
def test_gpt_is_the_transformer_graph_of_its_sizes(gpus):
    mine, theirs = read(gpus=gpus), transformer(gpus)
    for phase in ("forward", "dx", "dw"):
        read_operators = [operator for operator in mine.of_phase(phase) if not is_mask(operator)]
        wanted = [operator for operator in theirs.of_phase(phase) if operator.kind != "aggregate"]
        assert [
            (operator.kind, operator.layer, operator.gemms, operator.sent, operator.parameters)
            for operator in read_operators
        ] == [
            (operator.kind, operator.layer, operator.gemms, operator.sent, operator.parameters) for operator in wanted
        ]
    assert [operator.kind for operator in mine.of_phase("forward") if not operator.name.endswith("encode")] == [
        operator.kind for operator in theirs.of_phase("forward")
    ]
    assert Counter(operator.sent for operator in mine.of_phase("all_reduce")) == Counter(
        operator.sent for operator in theirs.of_phase("all_reduce")
    )
    assert mine.operators[-1].moved == theirs.operators[-1].moved
    for kind in ("layer_norm", "attention", "residual", "embedding"):
        assert [operator.moved for operator in of_kind(mine, kind)] == [
            operator.moved for operator in of_kind(theirs, kind)
        ]


def test_masks_are_the_only_further_products():
    dense = 2 * TOKENS * TOKENS * WIDTH  # [tokens, experts · capacity] × [·, width], at this capacity
    assert [flops([operator]) for operator in read().of_phase("forward") if is_mask(operator)] == [dense] * 2 * LAYERS
    extra = by_kind(read(), "forward") - by_kind(transformer(), "forward")
    assert extra == {"gate": LAYERS * dense, "aggregate": LAYERS * dense}


@pytest.mark.parametrize(("tied", "fused"), [(True, True), (False, False)])
def test_flops_are_those_that_torch_counts(tied, fused):
    module, graph = GPT(tied, fused), read(tied, fused)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        module(IDS, IDS)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as both:
        module(IDS, IDS).backward()
    assert flops(graph.of_phase("forward")) == forward.get_total_flops()
    assert flops(graph.of_phase("forward", "dx", "dw")) == both.get_total_flops()


def test_attention_written_out_is_the_fused_one():
    fused, plain = read().operators, read(fused=False).operators
    assert [operator.model_copy(update={"moved": 0}) for operator in fused] == [
        operator.model_copy(update={"moved": 0}) for operator in plain
    ]
    assert of_kind(read(), "attention")[0].moved == of_kind(read(fused=False), "attention")[0].moved


def test_the_choice_has_no_gradient_but_its_weight_has():
    graph = read()
    assert needs(graph, "0.encode") == {"0.layer_norm_2": True, "0.gate": False}
    assert needs(graph, "0.dispatch") == {"0.encode": True}
    assert needs(graph, "0.aggregate") == {"0.gate": True, "0.combine": True}
    assert needs(graph, "1.residual_2") == {"1.residual_1": True, "1.aggregate": True}
    assert not nx.has_path(graph.graph(), "dx.0.dispatch", "dw.0.gate")


def test_a_block_alone_adds_its_input():
    graph = read_module(Block(), (torch.randn(BATCH, LENGTH, WIDTH),), gpus=2)
    inside = [operator for operator in read().of_phase("forward") if operator.name.startswith("0.")]
    wanted = [(operator.kind, operator.gemms, operator.moved, operator.sent) for operator in inside]
    sizes = [(operator.kind, operator.gemms, operator.moved, operator.sent) for operator in graph.of_phase("forward")]
    assert sizes == [*wanted, ("loss", (), 2.0 * 4 * TOKENS * WIDTH, 0)]
    assert "dw.qkv" in {operator.name for operator in graph.operators}


def test_a_detached_branch_has_no_gradient():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.second(self.first(x).detach())

    graph = read_module(Detached(), (torch.randn(2, WIDTH),), gpus=1)
    assert needs(graph, "dense_ffn_2") == {"dense_ffn_1": False}


def test_tied_embeddings_are_reduced_once():
    reduced = [operator.name for operator in read(tied=True).of_phase("all_reduce")]
    assert "all_reduce.embedding" in reduced and "all_reduce.head" not in reduced
    assert set(needs(read(tied=True), "all_reduce.embedding")) == {"dw.embedding", "dw.head"}


def test_json_round_trip():
    assert OperatorGraph.from_json(read().to_json(), "graph") == read()
    assert nx.is_directed_acyclic_graph(read().graph())


def test_bytes_per_number_scales_what_is_moved_and_sent():
    half = read_module(GPT(), (IDS, IDS), gpus=2, bytes_per_number=2, name="half")
    assert half.name == "half"
    for kind in ("dispatch", "combine", "residual", "layer_norm"):
        for mine, whole in zip(of_kind(half, kind), of_kind(read(), kind), strict=True):
            assert (mine.sent, mine.moved) == (whole.sent / 2, whole.moved / 2)
    assert [operator.sent for operator in half.of_phase("all_reduce")] == [
        operator.sent / 2 for operator in read().of_phase("all_reduce")
    ]


def test_a_loop_over_experts_is_recorded_from_one_run():
    torch.manual_seed(0)
    graph = read_module(Loop(), (torch.randn(TOKENS, WIDTH),), gpus=2)
    assert graph.name.endswith("recorded from one run")
    up, down = of_kind(graph, "experts")
    rows = TOKENS * 2 // EXPERTS
    assert [(gemm.count, gemm.m, gemm.n, gemm.k) for gemm in (*up.gemms, *down.gemms)] == [
        (2, rows, INNER, WIDTH),
        (2, rows, WIDTH, INNER),
    ]
    assert [operator.kind for operator in graph.of_phase("forward")] == [
        "gate",
        "gate",
        "dispatch",
        "experts",
        "experts",
        "combine",
        "aggregate",
        "loss",
    ]
    assert {operator.sent for operator in graph.of_phase("forward") if operator.network} == {4.0 * TOKENS * WIDTH}


def test_square_experts_keep_their_two_layers_apart():
    graph = read_module(Loop(WIDTH, WIDTH), (torch.randn(TOKENS, WIDTH),), gpus=1)
    assert [operator.parameters for operator in of_kind(graph, "experts")] == [EXPERTS * WIDTH * WIDTH] * 2
    assert flops(of_kind(graph, "experts")) == 2 * 2 * TOKENS * WIDTH * WIDTH


def test_shared_experts_do_not_wait_for_the_routed_ones():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe, self.norm = MoE(), nn.RMSNorm(WIDTH)
            self.shared_experts = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))

        def forward(self, x):
            y = self.norm(x)
            return x + (self.moe(y) + self.shared_experts(y))

    graph = read_module(Shared(), (torch.randn(BATCH, LENGTH, WIDTH),), gpus=2)
    assert len(of_kind(graph, "shared_experts")) == 2
    assert not any(
        nx.has_path(graph.graph(), "combine", operator.name) for operator in of_kind(graph, "shared_experts")
    )
    assert set(needs(graph, "residual")) == {"aggregate", "shared_experts_2"}


@pytest.mark.parametrize(
    ("family", "way"), [("Mixtral", "batched_mm"), ("Mixtral", "eager"), ("Qwen3Moe", "grouped_mm")]
)
def test_hugging_face_models(family, way):
    transformers = importlib.import_module("transformers")  # seconds, which other tests need not wait for
    config, model = (getattr(transformers, family + part) for part in ("Config", "ForCausalLM"))
    sizes = (
        {"num_local_experts": EXPERTS}
        if family == "Mixtral"
        else {"num_experts": EXPERTS, "moe_intermediate_size": INNER}
    )
    configuration = config(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        use_cache=False,
        vocab_size=VOCABULARY,
        num_experts_per_tok=2,
        intermediate_size=INNER,
        **sizes,
    )
    configuration._experts_implementation = way
    torch.manual_seed(0)
    graph = read_module(model(configuration), (torch.randint(0, VOCABULARY, (BATCH, LENGTH)),), gpus=2)
    assert ("recorded" in graph.name) == (way == "eager")
    theirs = transformer_step(
        MoEModel(
            name="HF",
            layers=1,
            experts=EXPERTS,
            experts_per_token=2,
            d_model=WIDTH,
            d_ff=INNER,
            ffn_matrices=3,
            dtype="fp32",
        ),
        TrainingStep(batch=BATCH, sequence_length=LENGTH, heads=HEADS, dense_d_ff=1, vocabulary=VOCABULARY),
        2,
    )
    forward = [operator for operator in graph.of_phase("forward") if not operator.name.endswith("encode")]
    assert [operator.kind for operator in forward] == [operator.kind for operator in theirs.of_phase("forward")]
    for mine, wanted in zip(forward, theirs.of_phase("forward"), strict=True):
        assert mine.sent == wanted.sent
        if mine.kind == "qkv":  # fewer heads for keys and values than for queries
            assert flops([mine]) == flops([wanted]) * 2 // 3
        else:
            assert (mine.gemms, mine.parameters) == (wanted.gemms, wanted.parameters)


@pytest.fixture
def fake_ranks():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_ranks")
def test_traced_all_to_alls_stand_for_themselves():
    graph = read_module(ParallelMoE(), (torch.randn(TOKENS, WIDTH),), gpus=4)
    single = read_module(MoE(), (torch.randn(TOKENS, WIDTH),), gpus=4)
    assert graph.operators == single.operators


def test_kind_of_overrides_the_names():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, EXPERTS), nn.Linear(EXPERTS, WIDTH)

        def forward(self, x):
            return self.second(self.first(x))

    example = (torch.randn(TOKENS, WIDTH),)
    assert [operator.kind for operator in read_module(Plain(), example, gpus=1).of_phase("forward")] == [
        "dense_ffn",
        "dense_ffn",
        "loss",
    ]
    graph = read_module(Plain(), example, gpus=1, kind_of={"first": "gate", "second.weight": "shared_experts"})
    assert [operator.kind for operator in graph.of_phase("forward")] == ["gate", "shared_experts", "loss"]
    graph = read_module(Plain(), example, gpus=1, layer_of=lambda path: 5 if path.startswith("first") else 7)
    assert [operator.layer for operator in graph.of_phase("forward")] == [5, 7, 7]


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("blocks.3.attn.qkv", 3),
        ("model.layers.0.mlp.experts.7.up", 0),
        ("experts.2.0", None),
        ("lm_head", None),
        ("", None),
    ],
)
def test_layers_are_read_off_the_path(path, layer):
    assert layer_in_path(path) == layer


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        raise ValueError("this module does not run")


class Convolution(nn.Conv1d):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, 3)


class Wordy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.einsum("...d,de->...e", x, self.weight)


@pytest.mark.parametrize(
    ("module", "example", "options", "says"),
    [
        (Branch(), (torch.randn(2, WIDTH),), {}, "Branch cannot be traced.*does not run.*capacity.*transformer graph"),
        (Convolution(), (torch.randn(1, WIDTH, 8),), {}, "conv1d.*whose size Switchyard does not know"),
        (Wordy(), (torch.randn(2, WIDTH),), {}, r"einsum '\.\.\.d,de->\.\.\.e'; only two factors"),
        (nn.GELU(), (torch.randn(2, WIDTH),), {}, "multiplies nothing by weights"),
        (nn.Linear(2, 2), (torch.randn(2, 2),), {"gpus": 0}, "gpus is 0"),
        (nn.Linear(2, 2), (torch.randn(2, 2),), {"kind_of": {"": "magic"}}, "'magic'; known are embedding"),
        (nn.Linear(2, 2), [torch.randn(2, 2)], {}, "tuple of tensors"),
        ("module.pt", (torch.randn(2, 2),), {}, "a torch.nn.Module is needed, not str"),
    ],
)
def test_refusals(module, example, options, says, capfd):
    with pytest.raises(InputError, match=says):
        read_module(module, example, **{"gpus": 1, **options})
    assert not capfd.readouterr().err


def test_matrices_shared_by_more_than_two_operators_are_refused():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.ffn = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.ffn(self.ffn(self.ffn(x)))

    with pytest.raises(InputError, match=r"ffn\.weight are used by dense_ffn_1, dense_ffn_2, dense_ffn_3"):
        read_module(Recurrent(), (torch.randn(2, WIDTH),), gpus=1)
