"""Every command and its options. Imports nothing heavy: a command's group is imported when it runs.

Choices and defaults that an engine module owns are repeated here; `tests/test_start.py` holds them against their owners.
"""

import argparse
from itertools import chain
from pathlib import Path

from engine.cli.arguments import (
    SEVERAL,
    Commands,
    add_beside,
    add_cluster,
    add_command,
    add_inputs,
    add_options,
    add_step,
    add_travel,
    count,
)
from engine.systems import FILES

WRITERS = ("npz", "npy", "csv", "parquet", "loads-csv", "moe-balance", "sglang-statistics", "lmdeploy", "sglang-recorder")
"""Formats that a recording can be written in."""

TARGETS = ("sglang", "trtllm", "vllm", "vllm-ascend", "megatron", "exflow", "csv")
STEP_TARGETS = ("megatron-step", "deepspeed", "tutel")
"""Formats that a placement can be written in."""

KERNELS = ("order", "assign", "colocate", "colocate-heterogeneous", "affinity", "coactivation", "popularity")
KERNELS += ("replicate-devices", "replicate", "pipeline-degree", "partition", "partition-axes", "priority")
KERNELS += ("weight-gradients", "travel", "two-tier")

PAPERS = ("aurora", "exflow", "lina", "lancet", "pipemoe")
"""Papers with results that `reproduce` computes."""

PRESETS = {
    "w0": "tokens go round-robin over all experts",
    "w1": "three of four tokens choose among the first quarter of the experts",
    "w2": "three of four tokens choose among the first quarter of the experts, which contiguous blocks put on a few GPUs",
    "w3": "three of four tokens choose among every other expert",
    "w4": "tokens choose among all experts; ragged sources are named but not made in the pull request, nor here",
    "w5": "tokens choose among the second half of the experts",
    "w6": "three of four tokens choose among a quarter of the experts, the next quarter after every three steps",
    "w7": "tokens choose among all experts; in every fourth step half of them among the first quarter",
}
"""Imbalanced recordings that `synthetic` draws."""

THRESHOLDS = {
    "gain": "do it: minimum gain on recordings that the plan was not made from (0.05)",
    "try_gain": "try it: minimum gain on recordings that the plan was not made from (0.02)",
    "worst_gain": "do it: minimum gain on the worst of them (0)",
    "persistence": "do it: minimum part of the gain that is kept on held-out recordings (0.5)",
    "replica_gain": "do it: minimum gain from replicas (0.01)",
    "break_even_minutes": "maximum time until the move pays off, in minutes (10)",
    "memory": "maximum share of the fullest GPU's memory (0.9)",
    "tokens_per_expert": "minimum token copies per expert, on average (25)",
    "confidence": "that the gain lies in its interval (0.95)",
}
"""Figures of a verdict, with their defaults."""


def _record(commands: Commands) -> None:
    command = add_command(commands, "record", "record", "record from a running server of SGLang or vLLM, or from a model")
    servers = {
        "--sglang URL": "an SGLang server, such as http://localhost:30000",
        "--vllm URL": "a vLLM server, such as http://localhost:8000",
        "--text FILE": "run these texts (one a line, or .jsonl) through the model in the folder --model, here",
    }
    add_options(command.add_mutually_exclusive_group(required=True), servers)
    output = "with --prompts and --text: the .npz to write; otherwise the folder for the recorder's files"
    add_options(command, {"-o --output OUT": output}, required=True)
    options = {
        "--seconds N": ("SGLang's recorder: how long; with --prompts and --text: at most so long", {"type": float}),
        "--prompts FILE": "send these prompts (one a line, or .jsonl) and keep the routing that their answers carry",
        "--from-folder DIR": "SGLang's recorder: the server's SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR (by default "
        "/tmp), as it is reachable here; its files are copied from there",
        "--model FILE": "the model served: config.json, or a name of the catalogue (default with --sglang: what the "
        "server serves, if it is in the catalogue); with --text: the folder of the model",
        "--max-tokens N": ("tokens to generate a prompt (64; with --text: 0)", {"type": int}),
        "--concurrency N": ("prompts at a time (1)", {"default": 1}),
        "--ranks N": ("with --text: deal the texts to so many ranks in turn, and record the rank of each token", {"type": int}),
        "--timeout SECONDS": ("for one answer, and for files (300)", {"default": 300.0}),
    }
    add_options(command, options)
    command.epilog = (
        "The environment variable SWITCHYARD_API_KEY holds the key of a server that asks for one, and SWITCHYARD_MODELS the "
        "folders that models may be opened from."
    )


def _recordings(commands: Commands) -> None:
    command = add_command(commands, "recordings", "inspect", "what a file is; of a recording its checks, its skew and affinity")
    _add_files(command, "files, folders and archives; files of one recording are one")
    options = {
        "--fix": "write the recording mended by what its checks advise",
        "-o --output OUT": "where to (default: NAME-mended.npz beside the recording)",
        "--keep": ("with --fix: the phase to keep where both are there", {"choices": ("prefill", "decode")}),
    }
    add_options(command, options)
    command = add_command(commands, "recordings", "convert", "a recording in another format")
    _add_files(command, "the files of one recording")
    add_options(command, {"-o --output OUT": "the file to write"}, required=True)
    add_options(command, {"--to": ("the format (default: what the name of OUT ends in)", {"choices": WRITERS})})


def _add_files(command: argparse.ArgumentParser, help: str) -> None:
    command.add_argument("files", nargs="+", metavar="FILE[::NAME]", help=help)
    options = {
        "--model FILE": "the model that was recorded: its JSON, config.json, or a catalogue name",
        "--stages N": "pipeline stages of the run that was recorded, where the recording and the model leave that open",
        "--deployed FILE": "the plan that ran while it was recorded, which folds counts of its slots to experts",
    }
    add_options(command, options)


def _synthetic(commands: Commands) -> None:
    command = add_command(commands, "recordings", "synthetic", "a synthetic routing log, not recorded, for a model")
    add_options(command, {"--model FILE": "model JSON, Hugging Face config.json, or a catalogue name"}, required=True)
    presets = "; ".join(f"{key}: {text}" for key, text in PRESETS.items())
    options = {
        "--preset W": (
            "an imbalance workload of NVIDIA/Megatron-LM pull request #7488, in place of skew and affinity. " + presets,
            {"choices": list(PRESETS), "type": str},
        ),
        "--skew S": "exponent of the power law of popularity, 0: all alike (default: 1)",
        "--affinity A": "the probability that a token goes on to the experts that follow its own (default: 0.5)",
        "--drift D": "how far popularity wanders from step to step, 0: not at all, 1: each step is drawn anew (default: 0)",
        "--tokens N": ("default: 16384", {"default": 16_384}),
        "--steps N": "steps of a drift, and of a preset, of which w6 and w7 tell them apart (default: 12)",
        "--seed N": ("default: 0", {"default": 0}),
    }
    add_options(command, options)
    add_options(command, {"-o --output FILE.npz": None}, required=True)


def _plan(commands: Commands) -> None:
    command = add_command(commands, "plan", "plan", "run one system, or all of them and rank their plans")
    add_inputs(command, required=True)
    add_travel(command, "copies")
    command.add_argument("--system", required=True, choices=[*dict.fromkeys(chain(*FILES.values())), "all"])
    options = {
        "--also FILE[::NAME]": (
            "another recording of the model that the plan must serve as well; may be given several times",
            SEVERAL,
        ),
        "--in-use PLAN": "the plan that is deployed now, for what a move costs",
        "--serving STEP": "plan for the tokens of a serving step (its JSON), with the routing of the recording",
        "--set KEY=VALUE": (None, SEVERAL | {"dest": "settings"}),
        "--waterfall": "also turn the knobs of one model one by one, from what is deployed: what each saves, and what is left",
        "--dask ADDRESS": "run the systems on a Dask cluster: the address of its scheduler, tcp://… (default: SWITCHYARD_DASK)",
        "-o --output plan.json": "where the (best) plan goes",
    }
    add_options(command, options)
    add_beside(command)

    command = add_command(commands, "plan", "graph", "the operators of a training step, their sizes and times")
    add_inputs(command, required=True)
    command.set_defaults(also=[], in_use=None, travel=None, serving=None)
    add_options(command, {"-o --output graph.json": None})


def _simulate(commands: Commands) -> None:
    command = add_command(commands, "simulate", "simulate", "timeline and metrics of a plan on any workload")
    command.add_argument("plan", type=Path)
    add_inputs(command, required=False)
    add_travel(command, "the plan's own")
    add_options(command, {"-o --output timeline.json": None})

    command = add_command(commands, "simulate", "compare", "plans side by side, with the differences to the first")
    command.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    add_inputs(command, required=False)
    add_travel(command, "the plan's own")


def _serve(commands: Commands) -> None:
    command = add_command(commands, "judgement", "serve", "what plans come to in a whole step of prefill or decode")
    command.add_argument("plans", nargs="+", type=Path, metavar="PLAN", help="gains are over the first")
    add_step(command, required=True)
    add_inputs(command, required=False)
    add_travel(command, "as the plan says")


def _size(commands: Commands) -> None:
    command = add_command(
        commands, "size", "size", "the cheapest clusters, with plans, of node types with a price for a target"
    )
    required = {
        "--workload FILE[::NAME]": ("recordings of the model; the slowest counts", {"nargs": "+", "action": "extend"}),
        "--model FILE": "model JSON, Hugging Face config.json, or a catalogue name",
        "--catalogue FILE": "node types with their prices and how many can be had, as JSON",
        "--target T": (
            "such as '50 ms a token', 'first token in 2 s', '20000 tokens/s at 512 sequences', 'at most $40 an hour'",
            {"type": str},
        ),
    }
    add_options(command, required, required=True)
    options = {
        "--front N": ("so many clusters, each for a fifth less time than the last one takes", {"type": count}),
        "--cost SOURCE": ("as for plan (default: datasheet)", SEVERAL),
        "-o --output FOLDER": "where the clusters and plans that meet it go",
    }
    add_options(command, options)
    add_step(command, required=False)
    add_travel(command, "copies")


def _verdict(commands: Commands) -> None:
    command = add_command(commands, "judgement", "verdict", "do it, try it, not now, or cannot say yet: is a plan worth it?")
    command.add_argument("plan", type=Path)
    thresholds = "; ".join(f"{name}: {text}" for name, text in THRESHOLDS.items())
    options = {
        "--deployed FILE": "what runs now: a plan, a serving engine's plan file, linear or round-robin (default: "
        "experts in contiguous blocks)",
        "--threshold NAME=VALUE": (thresholds, SEVERAL | {"dest": "thresholds"}),
    }
    add_options(command, options)
    add_inputs(command, required=False, several=True)
    add_step(command, required=False)
    add_travel(command, "as the plans say")


def _redundancy(commands: Commands) -> None:
    command = add_command(commands, "judgement", "redundancy", "how many spare slots are worth their memory?")
    add_inputs(command, required=True, several=True)
    add_step(command, required=False)
    add_travel(command, "copies")
    groups = "groups of experts that EPLB keeps on a node where nodes divide them; DeepSeek-V3's gate has 8 (default: 1)"
    algorithms = {"choices": ("best", "eplb"), "default": "best"}
    options = {
        "--algorithm": ("of replicas; eplb: DeepSeek's greedy, to the letter", algorithms),
        "--groups N": (groups, {"default": 1}),
    }
    add_options(command, options)


STUDIES = {
    "affinity": "tokens that a plan by affinity needs, and other recordings (--also) that it is scored on",
    "sweep": "a training step (--training) by kind=micro_op, degree or range, over values",
    "sensitivity": "a plan's time with everything a share less and more",
    "curve": "a plan over a whole range of one field=network, compute, latency, contention, tokens, width or noise",
    "contention": "from which contention on ordering sends pays",
    "imprecision": "plans on traffic of which so large levels are noise",
    "capacity": "how many GPUs a target in seconds takes",
    "replan": 'a plan for a change, such as {"network": 2}',
    "front": "plans between balance and affinity",
    "matrix": "one plan a recording (--also), scored on every recording",
    "lina": "Lina's two phases by lengths of paths; learnt from --also or the first half",
    "deployments": "the cheapest deployments of a model (--model) for --target, on GPUs with a --price",
    "utilisation": "GPUs under a plan for two models, with each alone and with both",
}


def _study(commands: Commands) -> None:
    command = add_command(commands, "study", "study", "the studies of the pages: the same questions, the same answers")
    command.add_argument("study", choices=list(STUDIES), help="; ".join(f"{name}: {text}" for name, text in STUDIES.items()))
    several = {"nargs": "+", "action": "extend", "dest": "plans", "default": []}
    add_options(command, {"--plan FILE": ("a plan to study; of several, curve draws all (default: the baseline)", several)})
    add_inputs(command, required=False)
    add_travel(command, "the plan's own, or copies")
    options = {
        "--also FILE[::NAME]": ("another recording of the model; may be given several times", SEVERAL),
        "--in-use PLAN": "the plan that is deployed now",
        "--set KEY=VALUE": (
            "a field of the study, or an option of the system that it runs; lists with commas, as in levels=0,0.25,0.5",
            SEVERAL | {"dest": "settings"},
        ),
    }
    add_options(command, options)
    group = command.add_argument_group("deployments")
    options = {
        "--prompt N": "tokens of a prompt",
        "--output N": "tokens generated for it",
        "--target T": (
            "such as '20 ms a token', 'first token in 2 s', '5000 tokens/s in all', 'at most $40 an hour', several together",
            {"type": str},
        ),
        "--price GPU=PRICE": ("of a GPU of this type an hour; may be given several times", SEVERAL | {"dest": "prices"}),
        "--most N": "GPUs in all (default: 64)",
        "--config FILE": ("the model's Hugging Face config.json (default: as --model or the model is called)", {"type": str}),
    }
    add_options(group, options)
    said = "sensitivity, curve, contention, imprecision: time this whole step (its JSON), attention and all"
    add_options(command, {"--serving STEP": said})


def _drift(commands: Commands) -> None:
    command = add_command(commands, "study", "drift", "how a plan ages over recordings in order of time, and when moving pays")
    add_inputs(command, required=True, several=True)
    add_travel(command, "copies")
    add_step(command, required=False)
    command.add_argument("--system", required=True, choices=[*dict.fromkeys(chain(*FILES.values()))])
    options = {
        "--parts N": "cut one recording into so many windows, in order of time",
        "--passes N": ("passes (with --serving: steps) of a window (1000)", {"default": 1000}),
        "--deployed FILE": "what runs at first, as for verdict (default: the plan that the system makes of the first window)",
        "--set KEY=VALUE": ("an option of the system", SEVERAL | {"dest": "settings"}),
    }
    add_options(command, options)


def _export(commands: Commands) -> None:
    command = add_command(commands, "export", "export", "a plan as an engine or a training framework reads it, or for Perfetto")
    command.add_argument("plan", type=Path, help="a plan, a serving engine's plan file, 'linear' or 'round-robin'")
    command.add_argument("--to", required=True, choices=[*TARGETS, *STEP_TARGETS, "perfetto"])
    add_options(command, {"-o --output FILE": None}, required=True)
    options = {
        "--even": "project the plan to as many slots on every GPU, and say what that costs",
        "--mtp": "trtllm: with a layer for multi-token prediction",
        "--measured RUN": "perfetto: with the measured run beside; what 'launch --json' printed",
    }
    add_options(command, options)
    add_inputs(command, required=False)
    add_travel(command, "the plan's own")


SCALE = "testbed: links S times as slow as drawn (default: what brings the fastest to 100 Mbit/s)"


def _launch(commands: Commands) -> None:
    command = add_command(commands, "launch", "launch", "run a plan as a torch.distributed job; measured beside predicted")
    command.add_argument("plans", nargs="+", type=Path, metavar="PLAN", help="several are run in turn and compared")
    add_inputs(command, required=False)
    on = "testbed: the plan's cluster emulated on this machine, with shaped links (needs root and iproute2)"
    add_options(command, {"--on": (on, {"choices": ["local", "testbed", "slurm", "kubernetes"], "default": "local"})})
    add_cluster(command)
    options = {
        "--scale S": SCALE,
        "--ranks N": "default: one per attached GPU, at most 4 on a CPU (the nearest number that keeps nodes where a "
        "plan uses them)",
        "--text FILE": "run the model itself, in the folder --model, on these texts: a .txt with one a line, or a .jsonl; "
        "PLAN may then be an engine's plan file, 'linear' or 'round-robin'",
        "--new-tokens N": "with --text: tokens that each text goes on with (default 20)",
        "--tokens N": "tokens to replay, or to make of loads or a matrix (default: what takes some seconds)",
        "--dtype": ("of all numbers (default: on GPUs the model's own, on CPUs fp32)", {"choices": ["fp32", "bf16"]}),
        "--repeats N": ("timed passes (default 3)", {"default": 3}),
        "--limit SECONDS": ("time limit (default 900)", {"default": 900.0}),
    }
    add_options(command, options)

    for name, help in (
        ("status", "how a launch on a cluster stands, by its scheduler"),
        ("cancel", "end a launch on a cluster"),
        ("collect", "what a launch on a cluster measured, beside the prediction"),
    ):
        command = add_command(commands, "launch", name, help)
        command.add_argument("folder", type=Path, help="its run folder")


def _devices(commands: Commands) -> None:
    command = add_command(
        commands, "devices", "calibrate", "measure GEMMs and collectives on the attached devices, as a source of costs"
    )
    kind = {"--type TYPE": "the catalogue's type of GPUs that are not known by name"}
    on = "testbed: a cluster emulated on this machine, with shaped links (needs root and iproute2)"
    numbers = "numbers of the GEMMs; may be given several times (default: bf16 and fp32 on GPUs, fp32 on the CPU)"
    options = {
        "--on": (on, {"choices": ["local", "testbed"], "default": "local"}),
        "--cluster FILE": "testbed: the cluster to emulate",
        "--scale S": SCALE,
        "--ranks N": "default: one per attached GPU, without any 2 to 4 on the CPU; on a testbed one per GPU of the "
        "cluster, at most 8",
        "--dtype": (numbers, SEVERAL | {"choices": ["bf16", "fp16", "fp32"]}),
        **kind,
        "--quick": "measure for some 5 s instead of some 30 s",
    }
    add_options(command, options)
    add_options(command, {"-o --output profile.json": "where it goes, for --cost"}, required=True)

    command = add_command(
        commands,
        "devices",
        "detect",
        "the GPUs of this machine, of one whose 'nvidia-smi topo -m' was saved, or of measured pairs, as a cluster",
    )
    options = {
        "--topology FILE": "what 'nvidia-smi topo -m' or 'rocm-smi --showtopo' printed",
        "--pairs FILE": (
            "nccl-tests output of sendrecv_perf or alltoall_perf between two GPUs each, as files, folders and archives: "
            "the cluster whose ports and links meet these pairs best, beside what was measured",
            {"nargs": "+"},
        ),
        **kind,
        "-o --output cluster.json": None,
    }
    add_options(command, options)


def _efficiency(commands: Commands) -> None:
    command = add_command(
        commands,
        "devices",
        "efficiency",
        "what a cluster's ports reach where several sends meet, as it says or as measured times tell",
    )
    add_options(command, {"--cluster FILE": "cluster JSON, or a catalogue name"}, required=True)
    options = {
        "--measured FILE": (
            "times in which different numbers of sends met: what `calibrate` writes, nccl-tests output of sendrecv_perf "
            "and alltoall_perf, measured times (JSON, CSV); may be given several times",
            SEVERAL,
        ),
        "--ports": (
            "what was measured, on a cluster that has both: ports to the fabric, or links inside a node",
            {"choices": ["fabric", "links"]},
        ),
        "--relative": "other ports were measured, such as emulated ones: only shares of what the fewest sends reach count, "
        "no start-up",
        "-o --output cluster.json": "the cluster with the fit",
    }
    add_options(command, options)


def _catalogue(commands: Commands) -> None:
    command = add_command(commands, "catalogue", "catalogue", "GPUs, clusters and models to start from, with their sources")
    command.add_argument("gpu", nargs="?", metavar="GPU", help="a type, to write nodes of it as a cluster")
    add_options(command, {"--nodes N": ("default: 1", {"default": 1}), "-o --output cluster.json": None})


def _solve(commands: Commands) -> None:
    command = add_command(commands, "solve", "solve", "one kernel on its bare problem: JSON on standard input, JSON out")
    command.add_argument("kernel", choices=KERNELS)
    command.add_argument("--options", default="{}", help='for example {"time_limit": 10, "seed": 0, "exact": true}')


def _trust(commands: Commands) -> None:
    add_command(commands, "judgement", "trust", "predictions beside public measurements, and how far they are off")
    command = add_command(commands, "predict", "predict", "times to the first token and per token of measured serving steps")
    command.add_argument("rows", type=Path, metavar="ROWS", help="a CSV table in the columns of silicon_sample.csv, or JSON")
    command.add_argument("--config", type=Path, metavar="FILE", help="config.json of a model that is not known by its name")
    command.add_argument("--why", metavar="ID", help="the parts of one row, and what could explain how far it is off")
    asked = command.add_mutually_exclusive_group()
    asked.add_argument("--rate", type=float, metavar="RATE", help="requests a second that arrive at random, in place of users")
    asked.add_argument("--replay", type=Path, metavar="FILE", help="recorded arrivals: Mooncake's JSON lines, or a CSV table")
    command.add_argument("--requests", type=count, default=2000, metavar="N", help="of --rate (2000)")


def _reproduce(commands: Commands) -> None:
    about = "figures and tables of the five papers from our engine, beside the published numbers"
    command = add_command(commands, "reproduce", "reproduce", about)
    command.add_argument("paper", choices=(*PAPERS, "all"))
    command.add_argument("--figure", metavar="NUMBER", help="only this one, as the paper numbers it: 'Figure 13', 'Table VI'")


def _upkeep(commands: Commands) -> None:
    command = add_command(commands, "upkeep", "clean", "remove old sessions, jobs and recordings that nothing refers to")
    command.add_argument("--dry-run", action="store_true", help="only say what would go")
    command = add_command(commands, "upkeep", "backup", "the data folder and the team's database in one file")
    command.add_argument("file", type=Path, metavar="FILE", help="the backup (zip); replaced if it is there")
    command = add_command(commands, "upkeep", "restore", "a backup into an empty data folder and an empty database")
    command.add_argument("file", type=Path, metavar="FILE", help="what backup wrote")
    add_command(commands, "upkeep", "health", "whether the disk has room and the database answers; exit 1 if not")


GROUPS = (
    _record,
    _recordings,
    _synthetic,
    _plan,
    _simulate,
    _serve,
    _size,
    _verdict,
    _redundancy,
    _study,
    _drift,
    _export,
    _launch,
    _devices,
    _efficiency,
    _catalogue,
    _solve,
    _trust,
    _reproduce,
    _upkeep,
)
"""Functions that add commands, in the order of --help."""
