"""A planned layer on real ranks against a dense one on a single process: outputs, gradients, and the bytes sent."""

import json
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from engine.communication.steps import Steps
from engine.communication.travel import Stops, rows_of_tokens, serving_gpus
from engine.communication.two_tier import two_tier
from engine.costs import Datasheet
from engine.errors import InputError
from engine.plan import Offload, Pipeline, Placement, Plan, Priority, SendOrder, Travel
from engine.problem import Problem, make_problem
from engine.runtime.exchange.links import Tiers
from engine.runtime.exchange.routes import route
from engine.runtime.experts import FEW, ffn
from engine.runtime.fit import not_followed
from engine.runtime.layer import PlannedExperts
from engine.runtime.layer_plan import layer_plans
from engine.runtime.trip import Spread, WeightedSum
from engine.systems import run, system_named
from tests.cases.launch_plans import blocks, plan_in, plan_with, skewed
from tests.cases.live_layers import D_FF, WIDTH, K, matrices_of, stack_of, tokens_of
from tests.cases.two_nodes import cluster_of
from tests.oracles import dense_moe
from tests.strategies import make_model

EXPERTS, LAYERS = 8, 2
MODEL = make_model(LAYERS, EXPERTS, K, d_model=WIDTH, d_ff=D_FF).model_copy(update={"dtype": "fp32"})
NODES = Tiers(node=(0, 0, 1, 1), port=(1e9,) * 4, link=(8e9,) * 4)


def placed(*slots: tuple[int, ...]) -> Placement:
    """The same slots in every layer, one tuple a GPU."""
    return Placement(experts=EXPERTS, experts_of_gpu=(slots,) * LAYERS, model_layers=MODEL.moe_layers)


UNEVEN = placed((0, 1, 2, 7), (3, 7, 3), (4, 5, 0, 7), (6,))
"""Expert 7 has three homes, expert 0 two, and expert 3 two slots of one GPU."""
ROUNDED = {"travel: fp8 out": 0.06, "travel: bf16 both ways": 0.02, "travel: fp8 once to every GPU": 0.06}
"""Relative to the largest output, where rows are rounded."""


def problem(ranks: int) -> Problem:
    return make_problem(skewed(300, MODEL), cluster_of(*[(1, None)] * ranks), MODEL, Datasheet())


def planned(system: str, ranks: int, **options) -> Plan:
    of_ranks = problem(ranks)
    return run(system_named(system, of_ranks), of_ranks, options).result.solution


def tiered(placement: Placement) -> Plan:
    """A two-tier order for other traffic than the layer's."""
    traffic = skewed(300, MODEL).demand(4) @ placement.share * MODEL.bytes_per_token
    schedules = [two_tier(matrix, NODES.network).solution for matrix in (*traffic, *traffic.transpose(0, 2, 1))]
    order = SendOrder(mode="two-tier", dispatch=schedules[:LAYERS], combine=schedules[LAYERS:])
    return plan_with(placement, send_order=order)


def in_parts(plan: Plan, degree: int, order: str = "dispatch-first") -> Plan:
    pipeline = Pipeline(forward=(degree,) * LAYERS, backward=(degree,) * LAYERS, order=order)
    return plan.with_parts(pipeline=pipeline, priority=Priority(policy="fair", bucket=25e6))


def travelling(unit: str, placement: Placement = UNEVEN, **more) -> Plan:
    return plan_with(placement, travel=Travel(unit=unit, **more))


MATCHED = cache(lambda: planned("aurora", 4, order="matched"))
OF_FOUR = {
    "linear": lambda: planned("linear", 4),
    "eplb with replicas": lambda: planned("eplb", 4, redundant=1),
    "exflow": lambda: planned("exflow", 4, execution="vanilla"),
    "aurora, matched": MATCHED,
    "aurora, shared": lambda: planned("aurora", 4, order="shared"),
    "uneven slots": lambda: plan_with(UNEVEN),
    "a GPU without experts": lambda: plan_with(placed((0, 1, 2), (3, 4, 5, 6), (7,), ())),
    "sequential": lambda: planned("rcs", 4),
    "two-tier": lambda: tiered(UNEVEN),
    "degree 2": lambda: in_parts(planned("linear", 4), 2),
    "degree 3, matched, interleaved": lambda: in_parts(MATCHED(), 3, "interleaved"),
    "degree 2, sequential": lambda: in_parts(planned("rcs", 4), 2),
    "travel: fp8 out": lambda: travelling("copies", dispatch="fp8"),
    "travel: bf16 both ways": lambda: travelling("copies", dispatch="bf16", combine="bf16"),
    "travel: once to every GPU": lambda: travelling("gpu"),
    "copies: fewest GPUs": lambda: travelling("gpu", replicas="fewest"),
    "travel: once to every GPU, matched": lambda: MATCHED().with_parts(travel=Travel(unit="gpu")),
    "travel: fp8 once to every GPU": lambda: travelling("gpu", dispatch="fp8"),
    "travel: once to every node": lambda: travelling("node"),
    "copies: fewest nodes": lambda: travelling("node", replicas="fewest"),
    "copies: nearest": lambda: travelling("copies", replicas="nearest-static"),
    "copies: by a linear programme": lambda: travelling("copies", replicas="lp"),
    "copies: fixed": lambda: travelling("copies", replicas="fixed"),
}
OF_TWO = {
    "linear": lambda: plan_with(blocks(MODEL, 2)),
    "in parts": lambda: in_parts(plan_with(blocks(MODEL, 2)), 2),
    "replicas": lambda: plan_with(placed(tuple(range(8)), (1, 2, 7))),
}


def in_groups() -> dict[str, Plan]:
    """Plans for two ranks, in every kind of exchange, for groups of two among four."""
    where, trace = blocks(MODEL, 2), skewed(300, MODEL)
    return {mode: plan_in(mode, trace, where, MODEL) for mode in ("concurrent", "matched", "sequential")}


OF_ONE = {"linear": lambda: plan_with(blocks(MODEL, 1)), "in parts": lambda: in_parts(plan_with(blocks(MODEL, 1)), 2)}
CASES = {4: OF_FOUR, 2: OF_TWO, 1: OF_ONE}
STRAIGHT = [name for name in OF_FOUR if name != "two-tier"]
"""Rows go straight to where they are served, and not by way of other ranks."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """The dense layer on the tokens of all ranks, in 64 bits: outputs and gradients."""

    y: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    inward: torch.Tensor
    outward: torch.Tensor

    @classmethod
    def of(cls, ranks: int) -> "Wanted":
        tokens = tokens_of(ranks, EXPERTS)
        matrices = matrices_of(EXPERTS)
        leaves = [tensor.double().requires_grad_() for tensor in (tokens.x, tokens.weight, *matrices)]
        x, weight, inward, outward = leaves
        y = dense_moe.outputs(x, tokens.chosen, weight, inward, outward)
        (y * tokens.target).sum().backward()
        return cls(y.detach(), *(leaf.grad for leaf in leaves))


class Ranks:
    """All cases on real ranks."""

    def __init__(self, outcomes_of, folder, ranks: int) -> None:
        self.plans, self.wanted = {name: plan() for name, plan in CASES[ranks].items()}, Wanted.of(ranks)
        told = {
            name: {"plan": plan.model_dump_json(), "tiers": NODES.model_dump() if ranks == 4 else None}
            for name, plan in self.plans.items()
        }
        if ranks == 4:
            told |= {
                f"{name}, in a group": {"plan": plan.model_dump_json(), "tiers": None} for name, plan in in_groups().items()
            }
        (folder / "plans.json").write_text(json.dumps(told))
        self.outcomes = outcomes_of("runtime.layer_ranks", ranks, PLANS=str(folder / "plans.json"))

    def all_of(self, case: str, name: str, width: int = WIDTH) -> torch.Tensor:
        """A tensor of the tokens of all ranks."""
        parts = [torch.tensor(outcome[case][name]).reshape(-1, width) for outcome in self.outcomes]
        return torch.cat(parts).double()


@pytest.fixture(scope="module")
def of_four(outcomes_of, tmp_path_factory) -> Ranks:
    return Ranks(outcomes_of, tmp_path_factory.mktemp("plans"), 4)


def off(tensor: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest number wanted."""
    return float((tensor.detach() - wanted).abs().max() / wanted.abs().max())


def hold(ranks: Ranks, case: str) -> None:
    """Outputs and gradients are those of the dense layer."""
    most, wanted = ROUNDED.get(case, 1e-5), ranks.wanted
    assert off(ranks.all_of(case, "y"), wanted.y) < most
    np.testing.assert_allclose(ranks.all_of(case, "again"), ranks.all_of(case, "y"), atol=1e-5)
    assert off(ranks.all_of(case, "x"), wanted.x) < most
    assert off(ranks.all_of(case, "weight", K), wanted.weight) < most
    factor = (wanted.x * tokens_of(len(ranks.outcomes), EXPERTS).x).sum(dim=0)
    for outcome in ranks.outcomes:
        assert off(torch.tensor(outcome[case]["factor"], dtype=torch.float64), factor) < most
    for name, of_all in (("inward", wanted.inward), ("outward", wanted.outward)):
        for outcome in ranks.outcomes:
            held = outcome[case]["held"]
            gradient = torch.tensor(outcome[case][name], dtype=torch.float64).reshape(len(held), *of_all.shape[1:])
            assert torch.allclose(gradient, of_all[held], rtol=0, atol=most * float(of_all.abs().max()))


@pytest.mark.parametrize("case", OF_FOUR)
def test_four_ranks_compute_what_a_dense_layer_does(of_four, case):
    hold(of_four, case)


@pytest.mark.parametrize("mode", in_groups())
def test_a_group_of_some_ranks_is_enough(of_four, mode):
    wanted = Wanted.of(2)
    for members in ((0, 2), (1, 3)):
        outcomes = [of_four.outcomes[rank][f"{mode}, in a group"] for rank in members]
        for name, of_all in (("y", wanted.y), ("x", wanted.x)):
            parts = [torch.tensor(outcome[name], dtype=torch.float64).reshape(-1, WIDTH) for outcome in outcomes]
            assert off(torch.cat(parts), of_all) < 1e-5


def test_replicas_have_the_same_gradient_to_the_last_bit(of_four):
    outcomes = [outcome["uneven slots"] for outcome in of_four.outcomes]
    replicas = [[copy for outcome in outcomes for copy in _of_expert(outcome, expert)] for expert in (0, 7)]
    assert [len(copies) for copies in replicas] == [2, 3]
    assert all(copy == copies[0] for copies in replicas for copy in copies)


def _of_expert(outcome: dict, expert: int) -> list:
    return [outcome["inward"][slot] for slot, held in enumerate(outcome["held"]) if held == expert]


def rows_between(plan: Plan, ranks: int) -> np.ndarray:
    """float64[src, dst] rows of a dispatch by the code that simulates and replays, none that stays. Copies of an expert serve
    each rank's tokens by the plan's rule, which knows no tokens of other ranks but their loads; without one in turn."""
    tokens, placement, travel = tokens_of(ranks, EXPERTS), plan.placement, plan.travel or Travel()
    chosen, source = tokens.chosen.numpy(), tokens.rank.numpy()
    stops = Stops(np.array(NODES.node)) if ranks == 4 else Stops(np.arange(ranks))
    if travel.replicas:
        load = np.bincount(chosen[chosen >= 0], minlength=EXPERTS).astype(float)
        own = [source == rank for rank in range(ranks)]
        parts = [serving_gpus(placement, LAYERS - 1, chosen[of], travel, source[of], stops, load) for of in own]
        hosts = np.concatenate(parts)
    else:
        copies = route(chosen, source, placement.share[-1])
        hosts = np.full(chosen.shape, -1)
        hosts[copies.token, copies.choice] = copies.dst
    rows = rows_of_tokens(hosts, source, stops, travel.unit)
    np.fill_diagonal(rows, 0)
    return rows


@pytest.mark.parametrize("case", STRAIGHT)
def test_the_bytes_sent_are_those_of_the_plan(of_four, case):
    plan = of_four.plans[case]
    rows, (out, back) = rows_between(plan, 4), (plan.travel or Travel()).row_bytes(MODEL)
    forth = [outcome[case]["bytes"][0] for outcome in of_four.outcomes]
    assert forth == (rows * out + rows.T * back).tolist()
    # Gradients go back in 32 bits, those of rows that served several experts with those of their gate weights.
    wide, brought = WIDTH * 4, 0 if (plan.travel or Travel()).unit == "copies" else K * 4
    assert [outcome[case]["bytes"][1] for outcome in of_four.outcomes] == (rows * wide + rows.T * (wide + brought)).tolist()


def test_the_bytes_that_ranks_pass_on_for_others_are_those_of_the_simulated_steps(of_four):
    plan, rows = of_four.plans["two-tier"], rows_between(of_four.plans["two-tier"], 4)
    (row, back), wanted, of_a_send = Travel().row_bytes(MODEL), np.zeros((4, 4)), np.zeros((4, 4))
    assert row == back
    schedules = plan.send_order.dispatch[-1], plan.send_order.combine[-1]
    for schedule, counts in zip(schedules, (rows, rows.T), strict=True):
        _, src, dst, size = Steps.of(schedule, counts, NODES.network).sends()
        np.add.at(wanted, (src, dst), size)
        np.add.at(of_a_send, (src, dst), 1)  # each is rounded to whole rows
    for bytes_ in ([outcome["two-tier"]["bytes"][way] for outcome in of_four.outcomes] for way in range(2)):
        sent = np.array(bytes_) / row
        assert (np.abs(sent - wanted) <= of_a_send).all()
        # Between the nodes every row goes once, whichever ranks it enters and leaves by.
        for here, there in ((slice(2), slice(2, 4)), (slice(2, 4), slice(2))):
            assert sent[here, there].sum() == (rows + rows.T)[here, there].sum()


def test_two_ranks_compute_the_same(outcomes_of, tmp_path_factory):
    of_two = Ranks(outcomes_of, tmp_path_factory.mktemp("plans"), 2)
    for case in OF_TWO:
        hold(of_two, case)


def test_one_rank_needs_no_process_group():
    """Everything but the exchange is the same."""
    wanted, tokens = Wanted.of(1), tokens_of(1, EXPERTS)
    for plan in OF_ONE.values():
        layer = PlannedExperts(stack_of(*matrices_of(EXPERTS)), layer_plans(plan(), 1, 0)[0])
        x = tokens.x.clone().requires_grad_()
        y = layer(x, tokens.chosen, tokens.weight)
        (y * tokens.target).sum().backward()
        assert off(y, wanted.y) < 1e-5 and off(x.grad, wanted.x) < 1e-5
        assert off(layer.experts.inward.grad, wanted.inward) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [5, 2 * FEW + 1])
def test_a_stack_of_experts_takes_every_format_few_rows_and_many(rows, dtype):
    inward, outward = (matrix[:2].to(dtype) for matrix in matrices_of(EXPERTS))
    stack, x = stack_of(inward, outward), torch.randn(rows, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(3))
    wanted = torch.cat([ffn(part, *pair, True) for part, *pair in zip(x.split([2, rows - 2]), inward, outward, strict=True)])
    assert off(stack(x, [2, rows - 2]), wanted) < (1e-5 if dtype == torch.float32 else 1e-14)


def test_gradients_of_weighted_sums_are_those_of_small_differences():
    place = torch.tensor([[0, -1], [2, 1], [-1, -1]])
    rows, weight = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((3, 4), (3, 2)))
    assert torch.autograd.gradcheck(lambda *leaves: WeightedSum.apply(leaves[0], place, leaves[1]), (rows, weight))
    nowhere = torch.full((3, 2), -1)
    WeightedSum.apply(rows[:0], nowhere, weight).sum().backward()
    assert not weight.grad.any() and not rows.grad.any(), "no rows, and still a part of the computation"
    source = torch.tensor([0, 1, 1])
    assert torch.autograd.gradcheck(lambda vectors: Spread.apply(vectors, source, place), (rows,))


def refused(match: str, plan: Plan, ranks: int = 4, **more) -> None:
    with pytest.raises(InputError, match=match) as error:
        layer_plans(plan, ranks, 0, **more)
    assert "\n" not in str(error.value)


def test_plans_that_do_not_fit_the_ranks_are_refused():
    refused("for 4 GPUs, and the process group has 2 ranks", plan_with(UNEVEN), ranks=2)
    refused("two-tier order: say which ranks share a node", tiered(UNEVEN))
    refused("once to every node: say which ranks", travelling("node"))
    refused("the nodes of 4 ranks are given, and there are 3", plan_with(blocks(MODEL, 3)), ranks=3, tiers=NODES)
    matched = planned("aurora", 4, order="matched").with_parts(travel=Travel(unit="node"))
    refused("once to every node go as they come", matched, tiers=NODES)


def test_choices_that_the_plan_does_not_know_are_refused():
    way = layer_plans(plan_with(UNEVEN), 4, 0)[1]
    for wrong in (8, -2):
        with pytest.raises(InputError, match=f"layer 2: a token chose expert {wrong}, and the plan knows 0 … 7"):
            way.slots(torch.tensor([[0, wrong]]), lambda loads: loads)


def test_parts_of_a_plan_that_are_not_carried_out_are_said():
    plan = plan_with(blocks(MODEL, 4))
    assert not_followed(plan) == []
    (line,) = not_followed(plan.with_parts(execution="context-coherent"))
    assert line.startswith("execution context-coherent: run as vanilla")
    lines = not_followed(plan.with_parts(offload=Offload(experts=1), priority=Priority(policy="fair", bucket=25e6)))
    assert [line.split(":")[0] for line in lines] == ["priority on the network", "experts in the host's memory"]
