"""How to record with TensorRT-LLM, Megatron-Core and any PyTorch model: the texts of their parts of the guide."""

from engine.recording.guide import EngineGuide, Way

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
                "Nothing is written unless the last iteration of the range is reached; that iteration itself does not "
                "count.",
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
                "Hooks do not run in CUDA graphs: layers in a graph are missing without a word.",
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
Transformers, or as a module of your own, under the recorder below.""",
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
                "Routers are found by what they return. Where that fails the recorder says so; name them with "
                "`routers=`.",
                "A router that returns only logits needs `k=`, and that is wrong where experts are chosen within "
                "groups.",
                "Other kernels round differently: a few choices in a hundred differ from the engine's.",
            ),
            source="engine/routing_recorder.py",
        ),
    ),
)
