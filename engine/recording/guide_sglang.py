"""How to record with SGLang: the texts of its part of the guide."""

from engine.recording.guide import EngineGuide, Way

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
    --ep-size 16""",
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
                "With speculative decoding, passes of the MTP layer have been counted into decoder layers (sglang "
                "#19812).",
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
    --expert-distribution-recorder-mode per_pass --ep-size 16""",
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
    --expert-distribution-recorder-mode per_token --ep-size 16 --disable-shared-experts-fusion""",
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
                "Prompts that you send yourself are not your traffic: take them from it.",
            ),
            source="SGLang, srt/layers/topk_capturer_base.py at 6c07f30; srt/state_capturer/routed_experts.py",
        ),
    ),
)
