"""The cheapest deployments: fronts against brute force and by hand, what is left out and why, and questions that cannot be."""

from itertools import product

import numpy as np
import pytest

from engine.catalogue import gpu_types
from engine.catalogue.packaged import cluster_of_machines, machine_size
from engine.compare.trust.serving import PUBLISHED
from engine.compare.trust.whole_steps import known_model, measured_steps
from engine.errors import InputError
from engine.serving.deployment import Demand, Deployment, Ranks
from engine.serving.forecast import MOST_ACROSS, fitted, forecast, groups_of, held_against, machine_of
from engine.serving.parts import DECODE
from engine.serving.sizes import usual_sizes
from engine.sizing.deployment_search import MOST_TENSOR, MOST_USERS, Search, cheapest
from engine.sizing.deployments import Found, Question, by_type, divisions, formats_of, newest_version
from engine.sizing.inputs import ServingTarget, read_serving_target
from tests.strategies import make_model

MODEL = make_model(layers=12, experts=64, k=4, d_model=2048, d_ff=1024)
SIZES = usual_sizes(MODEL)
PRICES = {"H200": 3.0, "B200": 5.0}


def question(**changes) -> Question:
    usual = {"model": MODEL, "sizes": SIZES, "checkpoint": "ours", "prompt": 1000, "output": 500, "prices": PRICES, "most": 4}
    return Question.from_dict(usual | changes, "question")


def answer(asked: Question) -> Found:
    return [*cheapest(asked)][-1]


def rate(deployment: Deployment, users: int, asked: Question) -> float:
    """Tokens/s by Little's law from the forecast alone."""
    found = forecast(deployment, Demand(prompt=asked.prompt, output=asked.output, users=users), asked.model, asked.sizes)
    return users * asked.output / (found.first_token + (asked.output - 1) * found.token)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("20 ms a token", ServingTarget(0.02)),
        ("TPOT <= 20ms, TTFT < 500 ms", ServingTarget(0.02, 0.5)),
        ("at least 50 tokens/s a user", ServingTarget(0.02)),
        ("50 tok/s/user and first token within 2 s", ServingTarget(0.02, 2.0)),
        ("5k tokens/s in all, at most $40 an hour", ServingTarget(None, None, 5000.0, 40.0)),
        ("a budget of 1,200 $/h", ServingTarget(price=1200.0)),
        ("20 ms per token; 1.5 s to the first token; 20000 tok/s; €40 per hour", ServingTarget(0.02, 1.5, 20000.0, 40.0)),
        ("40 tps per user for 200 users at once", ServingTarget(0.025, users=200)),
        ("$730 a month", ServingTarget(price=1.0)),
        ("a budget of $87.6k per year; 2 billion tokens a day", ServingTarget(rate=2e9 / 86400, price=10.0)),
        ("36M tokens/hour in all, €240/day", ServingTarget(rate=1e4, price=10.0)),
        ("2k concurrent users", ServingTarget(users=2000)),
        ("5,000 tps in all with 300 users at the same time", ServingTarget(rate=5000.0, users=300)),
        ("", ServingTarget()),
    ],
)
def test_targets_of_serving_in_words(text, target):
    read = read_serving_target(text)
    assert [read.token, read.first_token, read.rate, read.price, read.users] == pytest.approx(
        [target.token, target.first_token, target.rate, target.price, target.users]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20 ms a token, 50 tokens/s a user", "two limits of a kind"),
        ("50 tokens/s a user, 100 tokens/s per request", "two limits of a kind"),
        ("5 ms at 1.5 users", "write a whole number of users"),
        ("2000000 users at once", "at most 1,000,000"),
        ("20 parsecs", "'20 parsecs' is not understood; write such as '20 ms a token'"),
        ("0 tokens/s a user", "its tokens/s must be above 0"),
    ],
)
def test_targets_that_cannot_be(text, message):
    with pytest.raises(InputError, match=message):
        read_serving_target(text)


@pytest.mark.parametrize(
    "target", ["", "6 ms a token, first token in 200 ms", "20000 tokens/s", "3000 tokens/s, $30 an hour", "90 users"]
)
def test_the_front_is_that_of_all_candidates_one_by_one(target):
    asked = question(target=target, engines=["sglang"])
    search, limits = Search(asked), read_serving_target(target)
    tables = [table for group in search.groups() for table in search.tables(group)]
    every, met = 0, []
    for table in tables:
        for row in range(len(table.token)):
            deployment, users = table.deployment(row, "ours"), int(table.users[row])
            found = forecast(deployment, Demand(prompt=1000, output=500, users=users), MODEL, SIZES)
            assert (found.token, found.first_token) == pytest.approx((table.token[row], table.first[row]), rel=1e-9)
            assert deployment.gpus == table.gpus[row] <= 4
            made, every = rate(deployment, users, asked), every + 1
            replicas = max(int(np.ceil((limits.rate or 0) / made)), int(np.ceil((limits.users or 1) / users)))
            hour = deployment.gpus * replicas * PRICES[deployment.gpu]
            within = found.token <= (limits.token or np.inf) and found.first_token <= (limits.first_token or np.inf)
            if within and table.busy[row] <= 1 and deployment.gpus * replicas <= 4 and hour <= (limits.price or np.inf):
                met.append((hour if limits.in_all else hour / made / 3600 * 1e6, found.token, deployment.gpu))
    found = answer(asked)
    assert found.tried == every > 1000 and 10 < len(met) < every
    points = [(point.hour if limits.in_all else point.million, point.token, point) for point in found.points]
    front = [(price, token) for price, token, point in points if point.best]
    near = 1 - 1e-9
    for price, token in front:
        assert not [other for other in met if other[0] < price * near and other[1] < token * near]
    for price, token, gpu in met:
        assert [one for one in front if one[0] * near <= price and one[1] * near <= token]
        own = [(of, time) for of, time, point in points if point.deployment.gpu == gpu]
        assert [one for one in own if one[0] * near <= price and one[1] * near <= token]
    assert sorted(front) == front == sorted(front, key=lambda one: -one[1]) and len(front) == len(set(front))


def test_points_of_deepseek_r1_by_hand():
    """The cheapest on GB200 and on H200, from the forecasts of the deployments that are named and the prices; deployments near
    them are dearer, slower than the target, or cannot be."""
    pytest.importorskip("aiconfigurator_core")
    model, sizes = known_model("deepseek-ai/DeepSeek-R1")
    prices = {"H100": 2.5, "H200": 3.5, "B200": 5.0, "GB200": 6.0}
    changes = {"checkpoint": "deepseek-ai/DeepSeek-R1", "prompt": 1000, "output": 1000, "prices": prices, "most": 64}
    asked = question(model=model, sizes=sizes, target="20 ms a token", **changes)
    found = answer(asked)
    first = {gpu: next(point for point in found.points if point.deployment.gpu == gpu) for gpu in ("H200", "B200", "GB200")}
    assert found.points[0] == first["GB200"] and first["GB200"].best

    of = {"checkpoint": "deepseek-ai/DeepSeek-V3", "precision": "fp8"}
    wide, prompts = Ranks(tensor=1, data=32, expert=32), Ranks(tensor=1, data=8, expert=8)
    split = Deployment(engine="trtllm", version="1.1.0-dev.2", gpu="GB200", decode=wide, prefill=prompts, **of)
    eight = Ranks(tensor=8, expert_tensor=8)
    whole = Deployment(engine="sglang", version="0.5.10.post1", gpu="H200", decode=eight, **of)
    for deployment, users in ((split, 2048), (whole, 24)):
        point = first[deployment.gpu]
        assert (point.deployment, point.demand.users, point.replicas) == (deployment, users, 1)
        predicted = forecast(deployment, Demand(prompt=1000, output=1000, users=users), model, sizes)
        assert (point.token, point.high) == (predicted.token, predicted.token * (1 + fitted().margins.known))
        assert point.token <= 0.02 and sum(point.parts.values()) == pytest.approx(point.token)
        hour = deployment.gpus * prices[deployment.gpu]
        assert (point.hour, point.million) == pytest.approx((hour, hour / rate(deployment, users, asked) / 3600 * 1e6))
        more = forecast(deployment, Demand(prompt=1000, output=1000, users=users * 4 // 3), model, sizes)
        assert more.token > 0.02, "more users of the same servers are slower than the target"

    # Servers for prompts of half the GPUs cost less an hour, but prompts wait, so that a token costs more.
    fewer = split.model_copy(update={"prefill": Ranks(tensor=1, data=4, expert=4)})
    assert fewer.gpus * prices["GB200"] / rate(fewer, 2048, asked) > first["GB200"].hour / first["GB200"].rate
    # The same servers on H200 for only half the users are faster and dearer, so they are on its front too.
    half = next(point for point in found.points if (point.deployment, point.demand.users) == (whole, 12))
    assert half.token < first["H200"].token and half.million > first["H200"].million
    # Four H200 have no room for the weights, and neither have eight H100: sixteen of two machines have.
    reasons = {(each.gpu, each.why) for each in found.left_out}
    weights = 671e9
    assert 4 * gpu_types()["H200"].memory < weights and 8 * gpu_types()["H100"].memory < weights * 1.03
    assert {("H100", "memory"), ("H200", "token"), ("GB200", "prompts"), ("GB200", "not measured")} <= reasons
    on_h100 = [point for point in found.points if point.deployment.gpu == "H100"]
    assert on_h100[0].token <= 0.02 and on_h100[0].deployment.decode == Ranks(tensor=16, expert_tensor=16, servers=3)
    assert on_h100[0].held and not on_h100[0].best and on_h100[0].demand.users == 72
    assert any("has the sizes of deepseek-ai/DeepSeek-V3" in note for note in found.notes)


def test_servers_of_two_machines_by_hand():
    """Sixteen H100: exchanges between machines in a step of DeepSeek-V3: 61 layers, 58 with experts, rows of 7168."""
    pytest.importorskip("aiconfigurator_core")
    checkpoint = "deepseek-ai/DeepSeek-V3"
    model, sizes = known_model(checkpoint)
    of = {"engine": "trtllm", "version": "1.1.0-dev.2", "gpu": "H100", "checkpoint": checkpoint, "precision": "fp8"}
    prompts = Ranks(tensor=1, data=16, expert=16)
    tensor = Deployment(decode=Ranks(tensor=16, expert_tensor=16), prefill=prompts, **of)
    wide = Deployment(decode=prompts, prefill=prompts, **of)
    # 24 rows of 14,336 bytes, halves by turns, over eight ports of 50 GB/s, and a start-up of 10 us; two all-reduces a layer.
    reduced = 2 * 61 * (24 * 14336 / 8 / 50e9 + 10e-6)
    # 64 tokens a GPU: DeepEP's table for low latency has 58.2 us for the dispatch on two nodes and 101.6 us for the combine.
    exchanged = 58 * (58.2e-6 + 101.6e-6)
    for deployment, users, seconds in ((tensor, 24, reduced), (wide, 16 * 64, exchanged)):
        found = forecast(deployment, Demand(prompt=1000, output=1000, users=users), model, sizes)
        times = fitted().of(deployment)[list(DECODE).index("across machines")]
        assert found.parts["across machines"] == pytest.approx(seconds * times, rel=0.01)
        assert held_against(deployment) and found.high == found.token * (1 + fitted().margins.known)
    assert 1 < times < 1.3
    # Nothing is exchanged inside one machine; ports of GPUs without measured exchanges carry 3 bytes of each of 4 copies.
    one = machine_of("H200", "fp8", model, sizes)
    assert one.across(Ranks(tensor=1, data=8, expert=8), 64, "copies") == 0 < one.across(prompts, 64, "copies")
    other = machine_of("B200", "fp8", model, sizes)
    rows = 64 * 4 * 7168 / gpu_types()["B200"].bandwidth
    assert other.across(prompts, 64, "copies") == pytest.approx(58 * (3 * rows + 20e-6), rel=0.02)
    beyond = wide.model_copy(update={"decode": Ranks(tensor=1, data=32, expert=32)})
    found = forecast(beyond, Demand(prompt=1000, output=1000, users=2048), model, sizes)
    assert not held_against(beyond) and found.high / found.token - 1 == pytest.approx(fitted().margins.other_model)


def test_measured_servers_of_several_machines():
    """Those that forecasts count as held; and SGLang's published decode step on 72 H100 lies within its interval."""
    pytest.importorskip("aiconfigurator_core")
    most: dict[str, int] = {}
    for step in measured_steps():
        for ranks in (step.deployment.decode, step.deployment.prompts):
            if ranks.gpus > machine_size(step.deployment.gpu) > 1:
                on = groups_of(step.deployment)[0]
                most[on] = max(ranks.gpus, most.get(on, 0))
    assert most == MOST_ACROSS
    published = next(each for each in PUBLISHED if each.nodes == 9)
    checkpoint = "deepseek-ai/DeepSeek-V3"
    parts = {"decode": Ranks(tensor=1, data=72, expert=72), "prefill": Ranks(tensor=1, data=32, expert=32)}
    of = Deployment(engine="sglang", gpu="H100", checkpoint=checkpoint, precision="fp8", **parts)
    demand = Demand(prompt=2000, output=100, users=72 * published.step.sequences)
    found, measured = forecast(of, demand, *known_model(checkpoint)), published.step.sequences / published.rate
    assert found.low < measured < found.token < 1.35 * measured


@pytest.mark.parametrize(("gpu", "precision", "most"), [("H200", "fp8", 80), ("B200", "fp4", 64)])
def test_the_front_is_not_far_below_the_best_that_was_measured(gpu, precision, most):
    """At the speed of each measured deployment that no other beats, the front has as many tokens/s a GPU or nearly so: the
    search leaves out no division that engines are better with."""
    pytest.importorskip("aiconfigurator_core")
    checkpoint = "deepseek-ai/DeepSeek-V3"
    model, sizes = known_model(checkpoint)
    measured = []
    for step in measured_steps():
        of, demand = step.deployment, step.demand
        alike = (of.checkpoint, of.gpu, of.precision, demand.output) == (checkpoint, gpu, precision, 1024)
        if alike and demand.prompt == 1024 and of.gpus <= most:
            seconds = step.first_token + (demand.output - 1) * step.token
            measured.append((1 / step.token, demand.users * demand.output / seconds / of.gpus))
    best = [one for one in measured if not any(other[0] > one[0] and other[1] > one[1] for other in measured)]
    asked = question(
        model=model,
        sizes=sizes,
        checkpoint=checkpoint,
        prompt=1024,
        output=1024,
        prices={gpu: 1.0},
        most=most,
        formats=[precision],
    )
    front = [(1 / point.token, point.rate / point.gpus) for point in answer(asked).points]
    ratios = [max(made for at, made in front if at >= speed) / reached for speed, reached in best]
    assert len(ratios) >= 8 and min(ratios) > 0.85


def test_what_is_left_out_and_why():
    """Reading the weights once is a bound; other engines and number formats are left out unless asked for."""
    fast = answer(question(target="1 us a token"))
    assert not fast.points and {each.why for each in fast.left_out} <= {"bound", "not measured"} and fast.tried == 0
    model = MODEL
    numbers = 12 * 4 * 3 * 2048 * 1024 + SIZES.weights(model)[0] + SIZES.vocabulary * 2048
    least = 2 * numbers / 4 / gpu_types()["H200"].memory_bandwidth
    on_four = {"prices": {"H200": 3.0}, "engines": ["vllm"]}
    for factor, reasons in ((1.001, {"bound", "token"}), (0.999, {"bound"})):
        found = answer(question(target=f"{least * factor * 1e9} ns a token", **on_four))
        assert {each.why for each in found.left_out} == reasons and not found.points

    slow = answer(question(target="0.1 ms a token", prices={"B200": 5.0}))
    token = next(each for each in slow.left_out if each.why == "token")
    assert token.nearest > 1e-4 and slow.tried == token.count
    usual, more = answer(question(prices={"H100": 2.0})), answer(question(prices={"H100": 2.0}, extrapolate=True))
    assert {point.deployment.engine for point in usual.points} == {"trtllm"}
    assert {point.deployment.engine for point in more.points} > {"trtllm"}
    widest = max(fitted().margins.other_gpu, fitted().margins.other_model)
    assert all(point.high / point.token == pytest.approx(1 + widest) for point in more.points)
    four_bits = answer(question(formats=["nvfp4", "fp8"], prices=PRICES))
    assert [each.count for each in four_bits.left_out if each.why == "number format"] == [1]
    assert {(point.deployment.gpu, point.deployment.precision) for point in four_bits.points} <= {
        ("H200", "fp8"),
        ("B200", "fp8"),
        ("B200", "fp4"),
    }


def test_a_budget_and_a_rate_choose_replicas():
    asked = question(target="200000 tokens/s in all, at most $100 an hour", most=64)
    found = answer(asked)
    assert found.points and any(point.replicas > 1 for point in found.points)
    for point in found.points:
        assert point.rate >= 200_000 > point.rate * (point.replicas - 1) / point.replicas
        assert point.hour == point.gpus * PRICES[point.deployment.gpu] <= 100 and point.gpus <= 64
    assert {"price", "GPUs"} <= {each.why for each in found.left_out}


def test_candidates_stay_within_measured_sizes():
    asked = question(most=64, prices={"B200": 5.0})
    search = Search(asked)
    for table in (table for group in search.groups() for table in search.tables(group)):
        for ranks in (table.decode, *table.prefills):
            assert (ranks.gpus <= 8 or ranks.gpus in (16, 32, 64)) and ranks.tensor <= MOST_TENSOR
        assert (table.users <= MOST_USERS * table.servers).all() and (table.gpus <= 64).all()


@pytest.mark.parametrize(
    ("d_ff", "precision", "gpus", "expected"),
    [
        (1024, "bf16", 1, {"1 GPU"}),
        (1024, "bf16", 8, {"tp8", "tp4 dp2 ep8", "tp2 dp4 ep8", "dp8 ep8"}),
        (768, "fp8", 4, {"tp4 moe_tp2 ep2", "tp2 dp2 ep4", "dp4 ep4"}),
        (96, "fp8", 4, {"tp4", "tp2 dp2 ep4", "dp4 ep4"}),
        (97, "bf16", 128, set()),
    ],
)
def test_a_server_divides_heads_experts_and_matrices_evenly(d_ff, precision, gpus, expected):
    """Sixteen heads, eight of keys and values, 64 experts; 8-bit matrices of 768 rows are six blocks, of which four GPUs
    cannot have as many each."""
    model = MODEL.model_copy(update={"d_ff": d_ff})
    found = list(divisions(model, SIZES, precision, gpus))
    assert {ranks.in_words for ranks in found} == expected
    for ranks in found:
        assert ranks.gpus == gpus and SIZES.heads % ranks.tensor == 0 == model.experts % ranks.expert


@pytest.mark.parametrize(
    ("checkpoint", "dtype", "bits", "expected"),
    [
        ("ours", "bf16", None, "bf16"),
        ("ours", "fp8", None, "fp8"),
        ("ours", "fp8", 4.5, "fp4"),
        ("ours", "bf16", 4.25, "int4"),
        ("ours/ours-FP8", "bf16", None, "fp8"),
        ("ours/ours-NVFP4", "bf16", None, "fp4"),
        ("ours/ours-AWQ", "bf16", None, "int4"),
    ],
)
def test_the_number_format_of_a_checkpoint(checkpoint, dtype, bits, expected):
    assert formats_of(checkpoint, MODEL.model_copy(update={"dtype": dtype, "expert_bits": bits})) == (expected,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prices": {"H9000": 1.0}}, "no GPU type 'H9000'; known are"),
        ({"prices": {"h200": 1.0, "H200": 2.0}}, "H200 has two prices"),
        ({"prices": {"H200": 0.0}}, "the price of H200 must be above 0"),
        ({"prices": {}}, "prices"),
        ({"engines": ["sglnag"]}, "no engine 'sglnag' was measured; known are sglang, trtllm, vllm"),
        ({"formats": ["fp3"]}, "formats"),
        ({"most": 0}, "most"),
        ({"prompt": 0}, "prompt"),
    ],
)
def test_questions_that_cannot_be_are_one_line(changes, message):
    with pytest.raises(InputError, match=message) as error:
        question(**changes)
    assert "\n" not in str(error.value)


def test_eight_bit_integers_have_no_forecast_and_machines_have_sizes():
    with pytest.raises(
        InputError, match="experts at 8 bits a weight; name formats of another checkpoint: bf16, fp8, fp4, int4"
    ):
        answer(question(model=MODEL.model_copy(update={"expert_bits": 8})))
    assert question(prices={"b200": 1.0}).prices == {"B200": 1.0}
    assert [machine_size(gpu) for gpu in ("H200", "L40S")] == [8, 1]
    assert newest_version("sglang", "agg") == "0.5.10.post1" and newest_version("none", "agg") == ""
    assert {mode for _, mode in product(("sglang",), ("agg", "disagg")) if newest_version("sglang", mode)} == {"agg", "disagg"}


def test_a_stopped_search_has_what_was_found():
    asked, calls = question(), []
    for most in (1, 20):
        calls.clear()
        found = [*cheapest(asked, lambda most=most: calls.append(1) or len(calls) >= most)][-1]
        assert found.points and found.tried < answer(asked).tried


@pytest.mark.parametrize(
    ("gpu", "gpus", "machines", "of_links"),
    [
        ("H200", 20, [8, 8, 4], 450e9),
        ("GB200", 80, [72, 8], 900e9),  # a rack that its links join
        ("A100-40", 6, [4, 2], 300e9),
        ("L40S", 10, [8, 2], None),
        ("RTX 2080 Ti", 1, [1], None),
    ],
)
def test_gpus_stand_in_as_few_machines_as_hold_them(gpu, gpus, machines, of_links):
    cluster = cluster_of_machines(gpu, gpus)
    assert [len(node.gpus) for node in cluster.nodes] == machines
    assert {kind.type for kind in cluster.gpus} == {gpu} and cluster.latency > 0
    assert not of_links or {node.link_bandwidth for node in cluster.nodes} == {of_links}


def test_a_decision_names_the_cheapest_and_the_next_type_or_the_next_faster_one():
    found = answer(question(target="6 ms a token"))
    first, *others = by_type(found.points)
    assert found.decision.startswith(f"{first.as_servers} ({first.deployment.engine}): ") and first == found.points[0]
    assert f"The next GPU type: {others[0].as_servers}, {others[0].cost(False, '$')}, " in found.decision
    assert others[0].million >= first.million and others[0].deployment.gpu != first.deployment.gpu
    gpu = first.deployment.gpu
    alone = answer(question(target="6 ms a token", prices={gpu: PRICES[gpu]}))
    faster = [point for point in alone.points if point.token < alone.points[0].token]
    assert ("The next faster one: " in alone.decision) == bool(faster) and answer(
        question(target="1 us a token")
    ).decision == ""
