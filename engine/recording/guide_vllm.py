"""How to record with vLLM and vLLM-Ascend: the texts of their parts of the guide."""

from engine.recording.guide import EngineGuide, Way

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
            start="vllm serve Qwen/Qwen3-30B-A3B --enable-return-routed-experts",
            then="""\
curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "Qwen/Qwen3-30B-A3B", "prompt": "…", "max_tokens": 64}'""",
            ours="""\
python -m engine record --vllm http://localhost:8000 --prompts prompts.txt --max-tokens 64 -o recording.npz""",
            gives="""\
`choices[i].routed_experts` of every answer: base64 of a whole `.npy`, [prompt + completion − 1, MoE layers, k],
the prompt first. From 0.14 to 0.21 lists instead: `prompt_routed_experts` beside the choices, and the completion's
in each choice. `record` takes both and gathers them as one `.npz` with a sequence a prompt.""",
            size="""\
Tokens × MoE layers × k × 1 byte (2 with more than 256 experts) × 4/3 over the network: 619 bytes per token of
DeepSeek-R1. In the `.npz` 2 bytes a choice before compression.""",
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
            start="vllm serve Qwen/Qwen3-30B-A3B --enable-return-routed-experts",
            then="""\
curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "Qwen/Qwen3-30B-A3B", "prompt": "…", "max_tokens": 64}'""",
            ours="""\
python -m engine record --vllm http://localhost:8000 --prompts prompts.txt --max-tokens 64 -o recording.npz""",
            gives="The same as with vLLM.",
            size="""\
Tokens × MoE layers × k × 1 byte (2 with more than 256 experts) × 4/3 over the network: 619 bytes per token of
DeepSeek-R1. In the `.npz` 2 bytes a choice before compression.""",
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
