"""The verdict for a team with the recorded loads of DeepSeek-R1, and with DeepSeek-V2-Lite's routing:
`python -m tests.benchmarks.bench_verdict`. The tables are those of docs/verdict-examples.md, and one
of docs/verdict.md."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from engine.catalogue import cluster_presets, model_presets, node_types
from engine.cluster import Cluster
from engine.compare.judge import Judge, Serving, ratio_gain
from engine.compare.redundancy import Replication, knee, redundancy
from engine.compare.verdict import Verdict, verdict_of
from engine.compare.wording import WORDS
from engine.costs import Combined, Datasheet, DeepEP
from engine.formats import read_sizes, read_workload
from engine.formats.packaged import packaged_config
from engine.model import MoEModel
from engine.plan import Plan, Travel
from engine.problem import Problem, make_problem
from engine.serving.aiconfigurator import choose_operators
from engine.serving.step import ServingStep
from engine.simulate.serving import serve_as_measured
from engine.systems import SYSTEMS, run, usual_plan
from engine.units import seconds, share, signed
from engine.workload import Workload
from tests.benchmarks.shared import DATA, V2_LITE

LOADS = DATA / "deepseek-r1-loads"
NAMES = ("decode_in1000out1000", "decode_in2000out100", "prefill_in1024", "prefill_in2000out100")
DECODE = ServingStep(phase="decode", sequences=64, context=2000, output=1000)
PREFILL = ServingStep(phase="prefill", sequences=4, context=2000)
REPLICAS = {"redundant": 1, "algorithm": "eplb"}
"""EPLB to the letter on 288 slots: one spare slot on each of 32 GPUs."""


@dataclass(frozen=True)
class R1:
    """DeepSeek-R1 on 32 H100 in four nodes, at one step of serving."""

    step: ServingStep
    cluster: Cluster = field(default_factory=lambda: cluster_presets()["hgx-h100-4-nodes"].cluster)
    plans: dict[str, Plan] = field(default_factory=dict)
    model: MoEModel = field(default_factory=lambda: model_presets()["DeepSeek-R1"].model)

    @cached_property
    def recordings(self) -> dict[str, Workload]:
        return {name: read_workload(LOADS / f"{name}.json") for name in NAMES}

    @cached_property
    def serving(self) -> Serving:
        config = packaged_config("deepseek-ai/DeepSeek-V3")
        sizes = read_sizes(config)
        source, _ = choose_operators(config, self.model, sizes, self.cluster.gpus[0], self.step)
        return Serving(self.step, source, sizes)

    def problem(self, name: str) -> Problem:
        return make_problem(self.recordings[name], self.cluster, self.model, Datasheet())

    def plan(self, name: str) -> Plan:
        if name not in self.plans:
            self.plans[name] = run(SYSTEMS["eplb"], self.problem(name), REPLICAS).result.solution
        return self.plans[name]

    def verdict(self, name: str, deployed: str | None = None) -> Verdict:
        """On the plan made of one recording, judged on the other three; deployed: the plan of another, or contiguous blocks."""
        now = None if deployed is None else self.plan(deployed)
        return verdict_of(self.plan(name), self.problem(name), list(self.recordings.values()), now, serving=self.serving)

    def in_sample(self, name: str) -> float:
        judge, problem = Judge(self.problem(name), self.serving), self.problem(name)
        linear, _ = usual_plan(SYSTEMS["linear"], problem)
        return ratio_gain(*(judge.seconds(plan, problem.workload) for plan in (linear, self.plan(name))))

    def row(self, name: str) -> str:
        """Planned on one recording, in place of contiguous blocks."""
        verdict = self.verdict(name)
        gains = {part.part: signed(part.gain) for part in verdict.parts} | {name: f"({signed(self.in_sample(name))})"}
        cells = [name, *(gains[other] for other in NAMES), signed(verdict.gain_held_out), share(verdict.persistence)]
        return table_row(*cells, seconds(60 * verdict.break_even_minutes), WORDS[verdict.verdict])

    def replanned(self, deployed: str) -> str:
        """The verdicts on the plans of other recordings, with the plan of one deployed."""
        verdicts = {name: self.verdict(name, deployed) for name in NAMES if name != deployed}
        told = {name: in_words(verdict) for name, verdict in verdicts.items()}
        return table_row(deployed, *(told.get(name, "") for name in NAMES))

    def together(self, algorithm: str) -> str:
        """Planned on three of the recordings at once, judged on the fourth (columns)."""
        gains = []
        for held in NAMES:
            first, *others = (self.recordings[name] for name in NAMES if name != held)
            problem = make_problem(first, self.cluster, self.model, Datasheet(), others=tuple(others))
            plan = run(SYSTEMS["eplb"], problem, REPLICAS | {"algorithm": algorithm}).result.solution
            verdict = verdict_of(plan, problem, list(self.recordings.values()), serving=self.serving)
            gains.append(in_words(verdict))
        return table_row(f"`{algorithm}`", *gains)

    def spare_slots(self, planned: str) -> Iterator[str]:
        judged = [self.recordings[name] for name in NAMES if name != planned]
        judge = Judge(self.problem(planned), self.serving)
        points = list(redundancy(judge, self.recordings[planned], judged, Replication("eplb")))
        for point in points:
            chosen = " ← knee" if point.slots == knee(points).slots else ""
            yield table_row(
                f"{point.slots}{chosen}",
                str(point.spare),
                f"{point.planned_balancedness:.3f}",
                f"{point.balancedness:.3f}",
                seconds(point.seconds),
                f"{signed(point.gain)} ± {100 * (point.interval[1] - point.gain):.2f} %",
                signed(point.gain_worst),
                f"{point.memory_bytes / 1e9:.0f} GB",
            )


def in_words(verdict: Verdict) -> str:
    return f"{signed(verdict.gain_held_out)}, {WORDS[verdict.verdict]}"


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


BATCHES = (1, 4, 8, 16, 64, 256)


def by_batch(kind: str) -> str:
    """The row of docs/verdict.md for 32 GPUs: EPLB's plan in place of contiguous blocks, in decode steps of more and more
    sequences, over DeepEP's measured kernels; the gain of a step, and by how much the experts alone take longer."""
    drawn = node_types()[f"hgx-{kind.lower()}"]
    nodes = tuple(drawn.node(f"node {place}") for place in range(4))
    cluster = Cluster(name=f"32 {kind}", nodes=nodes, latency=drawn.fabric_latency)
    r1 = R1(ServingStep(phase="decode", sequences=1, context=2000, output=100, kv_dtype="fp8"), cluster)
    travel = Travel(dispatch="fp8", combine="bf16")
    cost = Combined(Datasheet(), DeepEP())
    problem = make_problem(r1.recordings[NAMES[1]], r1.cluster, r1.model, cost, travel=travel)
    plans = [run(SYSTEMS[name], problem, options).result.solution for name, options in (("linear", {}), ("eplb", REPLICAS))]
    cells = []
    for sequences in BATCHES:
        step = r1.step.model_copy(update={"sequences": sequences})
        served = [serve_as_measured(plan, problem, step, r1.serving.source, r1.serving.sizes).figures for plan in plans]
        longer = served[1].moe["ffn"] / served[0].moe["ffn"] - 1
        cells.append(f"{signed(served[1].gain_over(served[0]))} ({signed(longer)})")
    return table_row(kind, *cells)


def lite(redundant: int, *members: str) -> Verdict:
    """DeepSeek-V2-Lite on 8 H100: EPLB planned on the first task, judged in time and on the others."""
    recordings = [read_workload(V2_LITE, member=member) for member in members]
    model, cluster = model_presets()["DeepSeek-V2-Lite"].model, cluster_presets()["hgx-h100-8"].cluster
    problem = make_problem(recordings[0], cluster, model, Datasheet())
    plan = run(SYSTEMS["eplb"], problem, {"redundant": redundant, "algorithm": "eplb"}).result.solution
    return verdict_of(plan, problem, recordings)


def main() -> None:
    for step in (DECODE, PREFILL):
        r1 = R1(step)
        for title, rows in (
            ("planned on (rows), judged on (columns), over contiguous blocks; (in sample)", map(r1.row, NAMES)),
            ("deployed (rows), plan of (columns)", map(r1.replanned, NAMES)),
            ("planned on the three others, judged on (columns)", map(r1.together, ("eplb", "best"))),
            (f"spare slots, planned on {NAMES[0]}, judged on the others", r1.spare_slots(NAMES[0])),
        ):
            print(f"\n{step.phase}: {title}")
            for row in rows:
                print(row, flush=True)
    print("\nfrom which batch on")
    for kind in ("H100", "H200"):
        print(by_batch(kind), flush=True)
    for redundant in (0, 1):
        for members in (("intent",), ("intent", "summary")):
            verdict = lite(redundant, *members)
            print(f"\nV2-Lite, {redundant} spare slots per GPU, {' and '.join(members)}: {WORDS[verdict.verdict]}")
            print("\n".join(verdict.reasons))


if __name__ == "__main__":
    main()
