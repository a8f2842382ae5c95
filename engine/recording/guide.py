"""The guide to recording with each engine: the same words for the Workload page and for docs/recording.md."""

from typing import Literal

from pydantic import Field

from engine.schema import Frozen


class Way(Frozen):
    """One way to record with an engine.

    key: names it, and its estimate in `estimate.ESTIMATES`
    start: the command that starts the engine, or the program to run, as one would type it
    then: commands to type while it runs; "" if there is nothing to do
    ours: our command that does the same, "" if there is none
    gives: the files that come out, and their use for a plan
    size: the factors of its size
    traps: mistakes that have led to wrong plans
    source: the pages or files that say so
    """

    key: str = Field(pattern=r"^[a-z-]+$")
    title: str = Field(min_length=1)
    kind: Literal["loads", "routing", "plan"]
    start: str = Field(min_length=1)
    then: str = ""
    ours: str = ""
    gives: str = Field(min_length=1)
    size: str = Field(min_length=1)
    traps: tuple[str, ...] = Field(min_length=1)
    source: str = Field(min_length=1)


class EngineGuide(Frozen):
    """The guide to one engine. advice: on the choice of a way"""

    name: str = Field(min_length=1)
    advice: str = Field(min_length=1)
    ways: tuple[Way, ...] = Field(min_length=1)


def as_markdown(guide: EngineGuide) -> str:
    """The guide to one engine as a section of docs/recording.md."""
    return "\n\n".join([f"## {guide.name}", guide.advice, *map(_way_as_markdown, guide.ways)]) + "\n"


def _way_as_markdown(way: Way) -> str:
    kind = "python" if way.start.startswith(("from ", "import ")) else "text"
    parts = [f"### {way.title}", f"```{kind}\n{way.start}\n```"]
    if way.then:
        parts.append(f"```text\n{way.then}\n```")
    if way.ours:
        parts.append(f"Or with Switchyard, once the server runs:\n\n```sh\n{way.ours}\n```")
    parts += [f"**What comes out.** {way.gives}", f"**Size.** {way.size}"]
    parts.append("\n".join(f"* {trap}" for trap in way.traps))
    parts.append(f"Source: {way.source}.")
    return "\n\n".join(parts)


TENSORRT_LLM = EngineGuide(
    name="TensorRT-LLM",
    advice="""\
Its PyTorch backend counts experts in a range of iterations. Choose the range after the warm-up, and long enough:
loads of 100 iterations of small batches are noise.""",
    ways=(
        Way(
            key="tensorrt-llm",
            title="Counts of a range of iterations: `EXPERT_STATISTIC_ITER_RANGE`",
            kind="loads",
            start="""\
EXPERT_STATISTIC_PATH=/shared/expert_statistic EXPERT_STATISTIC_ITER_RANGE=100-200 \\
    trtllm-eval --model deepseek-ai/DeepSeek-R1 \\
    --tp_size 8 --ep_size 8 --extra_llm_api_options options.yaml --backend pytorch gsm8k""",
            gives="""\
A folder with `meta_info.json` (experts, experts per token) and `rankR.safetensors` of every rank, one int64
[experts] for each iteration and layer. The folder is the recording.""",
            size="""\
Iterations × ranks × MoE layers × experts × 8 bytes: 95 MB for 100 iterations of DeepSeek-R1 on 8 ranks.""",
            traps=(
                "**With a load balancer on, the counts are of slots and `num_experts` is the number of slots.** Fold "
                "them with the plan that ran, or record without a balancer; otherwise the loads are nonsense that "
                "looks right.",
                "Nothing is written unless the last iteration of the range is reached; that iteration itself does not count.",
                "All ranks' files belong together; on several nodes the folder must be shared.",
            ),
            source="""\
TensorRT-LLM, the expert statistic of its PyTorch backend, and examples/ep_load_balancer/README.md""",
        ),
    ),
)

MEGATRON = EngineGuide(
    name="Megatron-Core",
    advice="""\
The router trace writes the choices of every token as JSON lines, in training and in inference. It comes in two
ways that number layers differently: note which one you took.""",
    ways=(
        Way(
            key="megatron",
            title="Choices of each token: `--moe-routing-trace-path`",
            kind="routing",
            start="""\
# in training, and in inference without CUDA graphs (hooks)
--moe-routing-trace-path /shared/trace --moe-routing-trace-max-training-iters 50 --cuda-graph-impl none
# in inference with CUDA graphs
--moe-routing-trace-path /shared/trace --moe-routing-trace-max-inference-steps 200 --moe-enable-routing-replay""",
            gives="""\
`router_trace_rankR.jsonl` of every rank, one line per step and layer with `top_indices` of its tokens. The folder is
the recording.""",
            size="""\
Tokens × MoE layers × k × digits as text: some 2.2 kB per token of DeepSeek-R1. A training step of a million tokens
is 2 GB: take few steps.""",
            traps=(
                "Hooks count layers from 0 and **within the pipeline stage**; with `--moe-enable-routing-replay` they "
                "count from 1 over the whole model. With pipeline parallelism, layer 0 of two ranks may be two "
                "layers: say how many stages there were.",
                "Hooks do not run in CUDA graphs: layers in a graph are missing without a word. So is a layer in which a "
                "capacity factor dropped choices; padded to the capacity, its lines are of padding: record without one.",
                "Ranks of a tensor-parallel group without sequence parallelism record the same tokens.",
                'Lines with `"block": "mtp"` are the MTP layer, never to be added to decoder layers.',
                "Hidden states and logits in further files are large and not needed here.",
            ),
            source="""\
Megatron-LM at d98e8a6, megatron/core/transformer/moe/router_trace.py and examples/inference/README.md""",
        ),
    ),
)

PYTORCH = EngineGuide(
    name="Any PyTorch model",
    advice="""\
Where no engine serves the model, or the recording is to be exact and repeatable: run it with Hugging Face
Transformers, or as a module of your own, under the recorder below. For a model in a folder and texts in a file,
`record --text` does so.""",
    ways=(
        Way(
            key="pytorch",
            title="Forward hooks: `RoutingRecorder`",
            kind="routing",
            start="""\
from transformers import AutoModelForCausalLM

from engine.routing_recorder import RoutingRecorder

model = AutoModelForCausalLM.from_pretrained("allenai/OLMoE-1B-7B-0924")
with RoutingRecorder(model) as recorder:
    for input_ids in batches:  # int [batch, seq]; pass attention_mask by name if there is padding
        model(input_ids=input_ids)
recorder.save("my-text.npz")""",
            gives="""\
An `.npz` with the choices of every token in every MoE layer, and which sequence it belongs to.""",
            size="Tokens × MoE layers × k × 2 bytes before compression: 928 bytes per token of DeepSeek-R1.",
            traps=(
                "Routers are found by what they return. Where that fails the recorder says so; name them with `routers=`.",
                "A router that returns only logits needs `k=`, and that is wrong where experts are chosen within groups.",
                "Other kernels round differently: a few choices in a hundred differ from the engine's.",
            ),
            source="engine/routing_recorder.py",
        ),
    ),
)


SGLANG = EngineGuide(
    name="SGLang",
    advice="""\
For a balanced plan, the recorder's counts (`stat`) of real traffic are enough, and small: a minute, several times a
day, so that recordings can be compared. To place experts by which ones follow each other, or to see
which GPU sends to which, record tokens: with the answers (`return_routed_experts`) for prompts of your own, with the
recorder's `per_token` for live traffic.""",
    ways=(
        Way(
            key="sglang-stat",
            title="Counts of each step: the recorder's `stat`",
            kind="loads",
            start="""\
SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=/shared/recordings \\
    python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 \\
    --expert-distribution-recorder-mode stat --expert-distribution-recorder-buffer-size -1 \\
    --tp-size 16 --ep-size 16""",
            then="""\
curl -X POST http://localhost:30000/start_expert_distribution_record
# let traffic run
curl -X POST http://localhost:30000/stop_expert_distribution_record
curl -X POST http://localhost:30000/dump_expert_distribution_record""",
            ours="""\
python -m engine record --sglang http://localhost:30000 --seconds 60 --from-folder /shared/recordings -o recording""",
            gives="""\
One file, `expert_distribution_recorder_TIME.pt`, from rank 0, summed over all ranks: counts int32 [steps, decoder
layers, experts]. Loads, so plans that balance; no tokens, so nothing about affinity.""",
            size="""\
Steps × layers × experts × 4 bytes, whatever the tokens: 62 MB for 1000 steps of DeepSeek-R1.""",
            traps=(
                "With a buffer size above 0 (1000 unless told otherwise) it is a ring: the last steps only, out of "
                "order, unused rows zero. `-1` keeps all in order, and grows in every GPU's memory by as much per step "
                "as in the file: record a minute, not an hour.",
                "Counts are folded from slots to experts using the expert map at the time of the dump. A balancer that "
                "moved experts meanwhile makes them wrong: record without `--enable-eplb`.",
                "A server without a recorder does not refuse: its scheduler raises and the server goes down. `record` "
                "asks `/server_info` first.",
                "A dump empties the recorder; a second start empties it too.",
                "With speculative decoding, passes of the MTP layer have been counted into decoder layers (sglang #19812).",
                "Prefill and decode are counted together. Record each server of a disaggregated deployment by itself, "
                "otherwise record at a time of one kind of traffic.",
                "Without the variable the file goes to `/tmp` of the server's machine, or container. It cannot be "
                "downloaded over HTTP.",
            ),
            source="""\
SGLang, srt/eplb/expert_distribution.py at 02295fe and dd780ab; srt/entrypoints/http_server.py; server_args.py""",
        ),
        Way(
            key="sglang-per-pass",
            title="Counts of each step and rank: `per_pass`",
            kind="loads",
            start="""\
SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=/shared/recordings \\
    python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 \\
    --expert-distribution-recorder-mode per_pass --tp-size 16 --ep-size 16""",
            ours="""\
python -m engine record --sglang http://localhost:30000 --seconds 60 --from-folder /shared/recordings -o recording""",
            gives="""\
One file a rank, `expert_distribution_recorder_TIME_RANK.pt`: slots' counts of every forward pass, and the map from
slots to experts as it was at the end.""",
            size="Passes × ranks × layers × slots × 4 bytes: 62 MB per rank for 1000 passes of DeepSeek-R1.",
            traps=(
                "All ranks' files are one recording: with DeepEP in its low-latency mode a rank counts its own slots "
                "only, so one file alone says nothing.",
                "Files of ranks on other nodes lie on those nodes.",
            ),
            source="SGLang, srt/eplb/expert_distribution.py at 02295fe",
        ),
        Way(
            key="sglang-per-token",
            title="Choices of each token: `per_token`",
            kind="routing",
            start="""\
SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=/shared/recordings \\
    python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 \\
    --expert-distribution-recorder-mode per_token --tp-size 16 --ep-size 16 --disable-shared-experts-fusion""",
            ours="""\
python -m engine record --sglang http://localhost:30000 --seconds 20 --from-folder /shared/recordings -o recording""",
            gives="""\
One file a rank with the choices of every token in every layer, positions, whether a pass was prefill or decode,
and under DeepEP (normal mode) how many tokens went to which rank: a real traffic matrix.""",
            size="""\
Tokens × layers × 8 × 4 bytes (1952 bytes per token of DeepSeek-R1), and the counts of `per_pass`. Seconds of traffic
are enough; it is held in main memory until the dump.""",
            traps=(
                "It has 8 places per token: models with a smaller k are padded with −1, those with a larger one cannot "
                "be recorded so.",
                "Not with `--enable-two-batch-overlap`, and wrong with shared experts fused into the routed ones.",
                "It slows the server down: every pass waits for its copy.",
                "Choices are of slots. With redundant experts they have to be folded by the map in the file.",
            ),
            source="SGLang, srt/eplb/expert_distribution.py at 02295fe (`_DetailSinglePassGatherer`)",
        ),
        Way(
            key="sglang-answers",
            title="With each answer: `return_routed_experts`",
            kind="routing",
            start="python3 -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --enable-return-routed-experts",
            then="""\
curl http://localhost:30000/generate -H 'Content-Type: application/json' \\
    -d '{"text": "…", "sampling_params": {"max_new_tokens": 64}, "return_routed_experts": true}'""",
            ours="""\
python -m engine record --sglang http://localhost:30000 --prompts prompts.txt --model Qwen/Qwen3-30B-A3B -o recording.npz""",
            gives="""\
`meta_info.routed_experts` of every answer: base64 of int32 [prompt + completion − 1, decoder layers, k], the
choices of every token but the last, which was never computed with. `record` gathers them as one `.npz` with a sequence
a prompt.""",
            size="""\
Tokens × decoder layers × k × 4 bytes × 4/3 over the network, 2.6 kB per token of DeepSeek-R1; in the `.npz` MoE
layers alone and 2 bytes, 928 bytes per token before compression.""",
            traps=(
                "The text has no shape in it: layers and k have to be the model's. `record` holds the number of rows "
                "against the answer's tokens.",
                "Dense layers, and tokens that were never captured, are zeros, not −1. All k choices being expert 0 "
                "is impossible, so they are taken for missing.",
                "With speculative decoding some builds return zeros throughout.",
                "Newer servers narrow the ids (`SGLANG_ROUTED_EXPERTS_DTYPE`) and say so in `routed_experts_dtype`.",
                "Prompt and completion are in one array. For prefill alone, generate one token.",
                "Rows of a prefix that the cache held are in it too, and were computed for an earlier request: `cached_tokens` "
                "of the answer says how many. Keep it with the answer; they are left out.",
                "Prompts that you send yourself are not your traffic: take them from it.",
            ),
            source="SGLang, srt/layers/topk_capturer_base.py at 6c07f30; srt/state_capturer/routed_experts.py",
        ),
    ),
)


_VLLM_ANSWERS = {
    "start": "vllm serve Qwen/Qwen3-30B-A3B --enable-return-routed-experts",
    "then": """\
curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "Qwen/Qwen3-30B-A3B", "prompt": "…", "max_tokens": 64}'""",
    "ours": """\
python -m engine record --vllm http://localhost:8000 --prompts prompts.txt --max-tokens 64 -o recording.npz""",
    "size": """\
Tokens × MoE layers × k × 1 byte (2 with more than 256 experts) × 4/3 over the network: 619 bytes per token of
DeepSeek-R1. In the `.npz` 2 bytes a choice before compression.""",
}

VLLM = EngineGuide(
    name="vLLM",
    advice="""\
vLLM returns the routing of each token with its answer, for all requests or none. It writes no expert loads to
disk: its load balancer keeps them, and only its balancedness is a metric (`vllm:eplb_balancedness_avg` and others,
which `record --vllm` shows beside a recording). A file of loads needs the open pull request #41141.""",
    ways=(
        Way(
            key="vllm-answers",
            title="With each answer: `--enable-return-routed-experts`",
            kind="routing",
            **_VLLM_ANSWERS,
            gives="""\
`choices[i].routed_experts` of every answer: base64 of a whole `.npy`, [prompt + completion − 1, MoE layers, k],
the prompt first. From 0.14 to 0.21 lists instead: `prompt_routed_experts` beside the choices, and the completion's
in each choice. `record` takes both and gathers them as one `.npz` with a sequence a prompt.""",
            traps=(
                "It needs Model Runner V2 (`VLLM_USE_V2_MODEL_RUNNER=1` where vLLM would take the first) and prefix "
                "caching, which is on by default; 0.21 advised to turn that off, and marked cached positions −1.",
                "Refused at the start: pipeline parallelism, context parallelism, and several connectors that move "
                "keys and values between servers.",
                "Do not take the server's own warm-up for traffic: two public recordings begin with thousands of "
                "identical rows from its profile run (vllm #56716, #57151).",
                "Before #33013 ids could be of slots under the load balancer, not of experts.",
                "Loads from elsewhere in vLLM may be multiplied by data parallelism (#22167); routing is not.",
                "Balancedness in the log was averaged over the wrong axis before #36304, #36305 and #51813.",
                "Prompt and completion are in one array. For prefill alone, generate one token.",
                "Rows of a cached prefix are left out where the answer says how many (`--enable-prompt-tokens-details`).",
            ),
            source="""\
vLLM's documentation, training/routed_experts (latest) and training/routed_experts_replay (0.21)""",
        ),
    ),
)

VLLM_ASCEND = EngineGuide(
    name="vLLM-Ascend",
    advice="""\
Take the routing from answers, as with vLLM. Its own recording writes no loads but the placement that its balancer
would choose, and only its first model runner has it.""",
    ways=(
        Way(
            key="vllm-ascend-answers",
            title="With each answer, on Ascend",
            kind="routing",
            **_VLLM_ANSWERS,
            gives="The same as with vLLM.",
            traps=(
                "Before vllm-ascend #13882 captures were zero, or of slots.",
                "The profile run is left out on purpose (vllm-ascend #16795): use a version with it.",
            ),
            source="vllm-ascend at 182b75e, and the pull requests named",
        ),
        Way(
            key="vllm-ascend-map",
            title="The placement it would choose: `expert_map_record_path`",
            kind="plan",
            start="""\
DYNAMIC_EPLB=true EXPERT_MAP_RECORD=true vllm serve deepseek-ai/DeepSeek-R1 --enable-expert-parallel \\
    --additional-config '{"eplb_config": {"dynamic_eplb": true, "expert_map_record_path": "/shared/map.json"}}'""",
            gives="""\
A JSON file with the experts of each device and MoE layer (`moe_layer_count`, `layer_list`): a plan to compare
with, no recording.""",
            size="Layers × experts × some five characters: 68 kB for DeepSeek-R1.",
            traps=(
                "First model runner only; the second refuses these settings, and takes `--enable-eplb` and "
                "`load_collection_phase` instead.",
                "The file's name must end in `.json`.",
                "The layer whose number equals `moe_layer_count` is the MTP layer.",
            ),
            source="vllm-ascend at 182b75e; vllm_ascend/ascend_config.py",
        ),
    ),
)
