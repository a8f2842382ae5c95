"""Lina's hostings, estimates and two-phase scheduling, in the paper's tables: `python -m tests.benchmarks.bench_lina`.

The recordings are the sample ones: 8 layers of 16 experts, one expert per token. They stand in for the paper's models on
the paper's testbed: hidden and inner width 512 and 2048 (they give the 419 M parameters of its 12 layers with 16
experts), 64 copies of every recorded token (a batch of 131 072 tokens, with two all-to-alls about as long as in
its table 1), and 17 ms a layer outside the experts' part (the rest of that table without all-to-all, taken to be the
same for every scheme; on the paper's testbed a part of it is expert computation, which suffers from imbalance too, so
these figures are on the careful side for everything but the ideal). Longer paths start later, so the rows of table 5
are over different layers.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.catalogue import cluster_presets, model_presets
from engine.cluster import Cluster
from engine.costs import Datasheet
from engine.formats import read_workload
from engine.placement.devices.kernel import DevicesInstance, lower_bound, replicate_devices
from engine.placement.devices.search import pack_devices
from engine.placement.popularity import most_popular, profile_paths
from engine.problem import Problem
from engine.result import Limits
from engine.simulate.two_phase import SCHEMES, TwoPhaseOptions, TwoPhaseResult, two_phase
from engine.workload import RoutingTrace
from tests.benchmarks.shared import columns, timed
from tests.oracles.placing import check_devices

SAMPLES = Path(__file__).parents[2] / "sample_traces" / "tiny-moe"
NAMES = ("alpha-code", "alpha-prose", "alpha-man")
SETTINGS = {"copies": 64.0, "other_seconds": 0.017}
ROUNDS = 10
"""Random orders of the test sequences, so that percentiles are over more batches than the recording fills."""


def recording(name: str) -> RoutingTrace:
    return read_workload(SAMPLES / f"{name}.npz", name=name, num_experts=16)


def half(trace: RoutingTrace, which: int) -> RoutingTrace:
    """Every second sequence."""
    keep = trace.sequence % 2 == which
    return RoutingTrace(f"{trace.name} {which}", trace.experts[keep], trace.num_experts, trace.sequence[keep])


def shuffled(trace: RoutingTrace, tokens: int, seed: int = 0) -> RoutingTrace:
    """Whole batches of `tokens` tokens, of sequences in several random orders one after another."""
    rng = np.random.default_rng(seed)
    ids, length = np.unique(trace.sequence), int((trace.sequence == trace.sequence[0]).sum())
    place = np.arange(trace.tokens).reshape(len(ids), length)
    per_batch = tokens // length
    whole = len(ids) // per_batch * per_batch
    order = np.concatenate([place[rng.permutation(len(ids))[:whole]].ravel() for _ in range(ROUNDS)])
    return RoutingTrace(trace.name, trace.experts[order], trace.num_experts, trace.sequence[order])


def hostings() -> None:
    print("Hostings of Zipf popularities (exponent 0.6 to 1.2, 20 layers): largest load over mean or over the bound")
    formats = {"experts x devices, cap": "24", "one each": "9.3f", "Lina": "7.3f", "search 0": "9.4f", "ms": "6.1f"}
    row = columns(formats | {"search": "7.4f", "its ms": "6.0f", "bound x mean": "12.3f"})
    for experts, devices, cap in ((16, 16, 2), (16, 16, 4), (16, 8, 4), (64, 16, 5), (64, 16, 4), (256, 64, 5)):
        rows = []
        rng = np.random.default_rng(0)
        for _ in range(20 if experts < 100 else 4):
            popularity = rng.permutation(1 / np.arange(1, experts + 1) ** rng.uniform(0.6, 1.2))
            popularity /= popularity.sum()
            bound = lower_bound(popularity, devices, cap)
            linear = np.array_split(np.arange(experts), devices)
            lina = replicate_devices(DevicesInstance(popularity, devices, cap), method="lina")
            quick = replicate_devices(DevicesInstance(popularity, devices, cap), Limits(exact=False), kicks=0)
            best = replicate_devices(DevicesInstance(popularity, devices, cap), Limits(exact=False))
            figures = [check_devices(each, popularity, devices, experts) / bound for each in (linear, lina.solution)]
            for result in (quick, best):
                figures += [result.objective / bound, result.runtime * 1e3]
            rows.append([*figures, bound * devices])
        row(f"{experts} x {devices}, {cap}", *np.mean(rows, axis=0))
    print("Proofs (CP-SAT after the search, at most 10 s)")
    for experts, devices, cap in ((6, 4, 2), (8, 4, 2), (8, 4, 4), (8, 8, 2), (12, 6, 3), (16, 8, 4)):
        popularity = 1 / np.arange(1, experts + 1) ** 0.9
        result = replicate_devices(DevicesInstance(popularity, devices, cap))
        proof = f"{result.status}, gap {result.gap:.1e}, {result.runtime:.2f} s"
        print(f"  {experts} x {devices}, {cap}: {proof}", flush=True)


def patterns() -> None:
    print("\nTable 2: the four most popular experts of a layer")
    for name in NAMES:
        trace = recording(name)
        top = [most_popular(row, 4).tolist() for row in trace.load]
        print(f"  {name}: " + "; ".join(f"layer {layer}: {row}" for layer, row in enumerate(top)))


def pairs() -> list[tuple[str, RoutingTrace, RoutingTrace]]:
    own = [(name, half(recording(name), 0), half(recording(name), 1)) for name in NAMES]
    return [*own, ("code -> prose", recording("alpha-code"), recording("alpha-prose"))]


def summary(label: str, result: TwoPhaseResult) -> str:
    figures = result.figures("lina")
    wrong = result.wrong_rank[:, result.first_layer :].mean()
    return (
        f"  {label:<34} inference {figures.median_inference:.2f} {figures.tail_inference:.2f}, "
        f"tuned {result.fine_tuning_rate:6.1%}, right as a set {result.accuracy():6.1%}, "
        f"in order {result.accuracy('order'):6.1%}, {wrong:.1f} experts at a wrong rank"
    )


def scheduling(gpus: int) -> None:
    testbed = cluster_presets()["lina-4-nodes"].cluster
    cluster = Cluster(name=f"{gpus} GPUs", nodes=testbed.nodes[: gpus // 4], latency=testbed.latency)
    model = model_presets()["tiny-moe-alpha"].model.model_copy(update={"d_model": 512, "d_ff": 2048})
    options = TwoPhaseOptions(**SETTINGS)
    for name, train, test in pairs():
        batches = shuffled(test, options.batch_tokens)
        problem = Problem(batches, cluster, model, Datasheet())
        lengths = [replace(options, path_length=length) for length in (1, 3, 6)]
        results, seconds = timed(lambda: [two_phase(problem, train, each) for each in lengths])  # noqa: B023
        print(f"\n{name} on {gpus} GPUs, {results[0].batches} batches, {seconds / 3:.2f} s a simulation")
        print("Table 5: Lina by path length (inference time over ideal: median and 95th percentile)")
        for result in results:
            print(summary(f"path length {result.options.path_length}", result))
        middle = results[1]
        print("Figures 16 to 18: multiples of ideal, median and 95th percentile; ms a batch waits for the scheduler")
        best = two_phase(problem, train, replace(options, packing="best"))
        for label, result in (("", middle), (" (best hosting)", best)):
            for scheme in SCHEMES if not label else SCHEMES[2:]:
                f = result.figures(scheme)
                print(
                    f"  {scheme + label:<34} inference {f.median_inference:.2f} {f.tail_inference:.2f}, layer "
                    f"{f.median_layer:.2f} {f.tail_layer:.2f}, all-to-all {f.median_all_to_all:.2f} {f.tail_all_to_all:.2f}, "
                    f"waits {f.waiting * 1e3:.1f}"
                )
        layers = " ".join("-" if np.isnan(right) else f"{right:.2f}" for right in middle.accuracy_of_layer())
        ideal = np.median(middle.inference_seconds("ideal")) * 1e3
        print(f"Figure 19: right by layer {layers}; ideal takes {ideal:.0f} ms")
        print("What the paper leaves open (path length 3)")
        for label, change in (
            ("truncation to the letter", {"renormalise": False}),
            ("top-2 of each path", {"top_k": 2}),
            ("whole distribution of each path", {"top_k": 16}),
            ("lists in order", {"check": "order"}),
            ("only the experts' part, no copies", {"copies": 1.0, "other_seconds": 0.0}),
        ):
            print(summary(label, two_phase(problem, train, replace(options, **change))), flush=True)


def kernels() -> None:
    trace = recording("alpha-code")
    experts = trace.experts[:, :, 0]
    profile, profiling = timed(profile_paths, experts, 16, 3)
    estimates, estimating = timed(lambda: [profile.estimate(experts[:2048, 2:5], 4, 1) for _ in range(100)])
    estimate = estimates[-1]
    _, packing = timed(lambda: [pack_devices(16 * estimate / estimate.sum(), 16, 4) for _ in range(100)])
    print(
        f"\nprofile of {trace.tokens} tokens, 5 layers, path length 3: {profiling * 1e3:.1f} ms; estimate of 2048 tokens "
        f"{estimating * 10:.2f} ms; Lina's packing {packing * 10:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="*", default=[16, 8])
    arguments = parser.parse_args()
    hostings()
    patterns()
    for gpus in arguments.gpus:
        scheduling(gpus)
    kernels()


if __name__ == "__main__":
    main()
