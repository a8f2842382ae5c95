"""Public before and after figures of better balance, and ours: `python -m tests.benchmarks.bench_forced_balance`. The table is
that of docs/verdict.md, which says what was assumed.

vLLM's pull request 28449: DeepSeek-R1 on 16 H20 in two nodes, decode with eight users, 1024 tokens in and 512 out. Its routing
was not published; ours is of DeepSeek-R1's other recordings.

Training of Qwen3-235B-A22B on 256 H100: TFLOPS a GPU with routing forced to be even and as it came, at four lengths of
sequences. No routing was published, so skew's cost for a token is taken from the shortest, and the others are predicted: the
experts of a token take as long in a long sequence.
"""

from engine.catalogue import gpu, node_types
from engine.cluster import Cluster
from engine.compare.judge import Judge, Serving, ratio_gain
from engine.costs import Datasheet
from engine.formats import read_model, read_sizes, read_workload
from engine.formats.packaged import packaged_config
from engine.problem import make_problem
from engine.serving.roofline import RooflineOperators
from engine.serving.step import ServingStep
from engine.systems import SYSTEMS, usual_plan
from engine.training import balanced_load
from tests.benchmarks.bench_verdict import LOADS, NAMES
from tests.benchmarks.shared import MODEL, columns

H20 = {"type": "H20", "memory": 96e9, "memory_bandwidth": 4.0e12, "flops_fp16": 148e12, "flops_fp8": 296e12}
"""NVIDIA's sheet; links and ports are those of a node of H100."""
ROUND_ROBIN = 0.1457
TRAINED = {16: (295.0, 237.0), 32: (335.0, 277.0), 64: (368.0, 320.0), 128: (389.0, 357.0)}
"""By thousands (1024) of tokens: TFLOPS with forced balance, and without."""


def main() -> None:
    show = columns({"linear to round-robin": "22", "sequences a GPU": "16", "measured": "9.1%", "ours": "8.1%", "skew": "8.1%"})
    for sequences in (1, 8, 32):  # eight users leave half of the GPUs idle; a step has one sequence a GPU at least
        for name in NAMES:
            gain, skew = round_robin(name, sequences)
            show(name, str(sequences), ROUND_ROBIN, gain, skew)
    formats = {
        "Qwen3-235B": "12",
        "forced": "8.0f",
        "as it came": "10.0f",
        "ours": "8.1f",
        "error": "8.1%",
        "skew costs": "10.1%",
    }
    show = columns(formats, "TFLOPS a GPU in training, 16K taken for the cost of skew")
    for length, (forced, came) in TRAINED.items():
        ours = with_skew(length, forced)
        show(f"{length}K", forced, came, ours, ours / came - 1, forced / came - 1)


def round_robin(name: str, sequences: int) -> tuple[float, float]:
    """The gain of round-robin over contiguous blocks, and of balanced routing over these, on a recording."""
    card, kind = gpu("H100", 50e9).model_copy(update=H20), node_types()["hgx-h100"]
    nodes = tuple(kind.node(f"node {index}").model_copy(update={"gpus": (card,) * 8}) for index in range(2))
    recording, sizes = read_workload(LOADS / f"{name}.json"), read_sizes(packaged_config("deepseek-ai/DeepSeek-V3"))
    cluster = Cluster(name="16 H20", nodes=nodes, latency=kind.fabric_latency)
    problem = make_problem(recording, cluster, MODEL, Datasheet())
    step = ServingStep(phase="decode", sequences=sequences, context=1024, output=512)
    judge = Judge(problem, Serving(step, RooflineOperators(MODEL, sizes, card), sizes))
    blocks, spread = (usual_plan(SYSTEMS[system], problem)[0] for system in ("linear", "round-robin"))
    now = judge.seconds(blocks, recording)
    gains = (judge.seconds(spread, recording), judge.seconds(blocks, balanced_load(MODEL)))
    return tuple(ratio_gain(now, seconds) for seconds in gains)


def with_skew(length: int, forced: float) -> float:
    """TFLOPS without forced balance, where a token costs as many seconds more as at the shortest length."""
    shortest, (even, came) = next(iter(TRAINED.items()))
    more = arithmetic(shortest) * (1 / came - 1 / even)
    return arithmetic(length) / (arithmetic(length) / forced + more)


def arithmetic(length: int) -> float:
    """TFLOP of a token in forward and backward: six for a weight, and causal attention over half of the sequence."""
    config = packaged_config("Qwen/Qwen3-235B-A22B")
    model, sizes = read_model(config), read_sizes(config)
    experts = len(model.moe_layers) * model.experts_per_token * model.ffn_matrices * model.row_width * model.d_ff
    weights = experts + sizes.weights(model)[0] + sizes.vocabulary * model.d_model
    return (6 * weights + 6 * length * 1024 * model.layers * sizes.heads * sizes.head_size) / 1e12


if __name__ == "__main__":
    main()
