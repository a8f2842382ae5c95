"""The options that several commands share. Imports nothing heavy: --help must answer at once."""

import argparse
from pathlib import Path
from typing import Any

Commands = Any
"""The type of `argparse.ArgumentParser.add_subparsers()`, which argparse does not name."""

BALANCED = "balanced"
"""The name of an assumed recording: balanced routing, the aim of training."""

CLUSTER = {
    "image": (str, "NAME", "the project's image; without one, Slurm runs this installation, which its nodes have to see"),
    "nodes": (int, "N", "default: as the cluster is drawn"),
    "gpus_per_node": (int, "N", "default: as the cluster is drawn; 0 for CPUs"),
    "ranks_per_node": (int, "N", "default: one per GPU, on CPUs as many as the plan's GPUs take"),
    "cpus_per_node": (int, "N", "default: 4 per rank"),
    "memory_per_node": (float, "GIB", "default: 8 per rank"),
    "shared": (str, "FOLDER", "a folder that the job's nodes see too; the run folder is made in it"),
    "seen_as": (str, "FOLDER", "where the nodes have it (default: at the same place; on Kubernetes /shared)"),
    "partition": (str, "NAME", "Slurm's"),
    "account": (str, "NAME", "Slurm's"),
    "namespace": (str, "NAME", "Kubernetes' (default: default)"),
    "queue": (str, "NAME", "Volcano's, on Kubernetes (default: default)"),
    "claim": (str, "NAME", "the PersistentVolumeClaim on Kubernetes that holds the shared folder"),
}
"""Options of a launch on a cluster: type, metavar and help."""


def add_command(commands: Commands, group: str, name: str, help: str) -> argparse.ArgumentParser:
    """A new command with --json. It runs `run_NAME` of `engine.cli.GROUP`. help: its line in the list of commands"""
    command = commands.add_parser(name, help=help, description=help)
    command.set_defaults(group=group, command=name)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return command


TYPES = {"N": int, "S": float, "A": float, "D": float, "SECONDS": float}
TYPES |= dict.fromkeys(("ADDRESS", "TYPE", "URL", "SOURCE", "KEY=VALUE", "NAME=VALUE", "GPU=PRICE", "FILE[::NAME]"), str)
"""The type of an option's value by its metavar; of all others it is a path."""

SEVERAL = {"action": "append", "default": []}
"""Arguments of `add_argument` for an option that may be given several times."""


def count(text: str) -> int:
    """A whole number above 0. Raises argparse.ArgumentTypeError for one below."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def add_options(parser: Any, options: dict[str, Any], required: bool = False) -> None:
    """Add options: with a metavar of one value, without one of none or of given choices.

    parser: argparse.ArgumentParser, or a group of one
    options: help by names and metavar, as in "-o --output FILE"; or (help, more arguments of `add_argument`)
    """
    for names, told in options.items():
        help, more = told if isinstance(told, tuple) else (told, {})
        flags, metavar = [word for word in names.split() if word[0] == "-"], names.split()[-1]
        if metavar[0] != "-":
            more = {"type": TYPES.get(metavar, Path), "metavar": metavar, "required": required} | more
        elif "choices" not in more:
            more = {"action": "store_true"} | more
        parser.add_argument(*flags, help=help, **more)


def add_inputs(command: argparse.ArgumentParser, required: bool, several: bool = False) -> None:
    """Add the options for a plan's inputs.

    required: True for a new plan; else they default to the inputs that a plan was made from
    several: True for several recordings; `options.workload` is then a list
    """
    more = "" if required else " (default: what the plan was made from)"
    training = "; with --training it may be left out: balanced routing" if required else more
    one = f"the recording, or {BALANCED!r}{training}"
    many = {"nargs": "+", "action": "extend"}
    add_options(command, {"--workload FILE[::NAME]": ("recordings of the model" + more, many) if several else one})
    kinds = {"cluster": "cluster JSON", "model": "model JSON, Hugging Face config.json"}
    add_options(command, {f"--{name} FILE": f"{kind}, or a catalogue name{more}" for name, kind in kinds.items()}, required)
    options = {
        "--workload-b FILE[::NAME]": (f"the recording of a second model on the same GPUs{more}", SEVERAL),
        "--model-b FILE": "the second model (default: the same as the first)",
        "--training STEP": (
            f"plan a training step instead of inference: its JSON, or 'usual' for what the model and the cluster suggest{more}",
            {"type": str},
        ),
        "--graph FILE": f"the step's operators as JSON{more}",
        "--cost SOURCE": (
            "datasheet (the default), silicon (measured tables), deepep (measured exchanges: the network), or a file: an "
            "α–β profile or measured times (JSON, CSV), nccl-tests output, a PyTorch profiler trace; twice: computation "
            "and network each from the first that has it",
            SEVERAL,
        ),
    }
    add_options(command, options)


def add_travel(command: argparse.ArgumentParser, default: str) -> None:
    """Add the option for the travel of tokens. default: its default, for the help text"""
    command.add_argument(
        "--travel",
        metavar="UNIT[:OUT[:BACK[:COPIES]]]",
        help="how tokens travel: copies (every token-expert pair), gpu (one row per GPU) or node (one row per node), and the "
        "number formats of dispatch and combine, as in node:fp8:bf16; of an expert's copies: absent, in turn; fewest, each "
        "token to those that touch fewest GPUs or nodes, as in gpu:::fewest; nearest-static (SGLang with DeepEP, its default), "
        "nearest-dynamic, lp (SGLang) or fixed (vLLM-Ascend), a rank to the one that the engine gives it, as in "
        f"copies:fp8:bf16:nearest-static (default: {default})",
    )


def add_step(command: argparse.ArgumentParser, required: bool) -> None:
    """Add the options for a step of serving. required: True if the step must be given"""
    optional = "" if required else "; gains are then of whole steps (default: of a pass through the MoE layers)"
    add_options(command, {"--serving STEP": "the step as JSON" + optional}, required)
    add_beside(command)


def add_beside(command: argparse.ArgumentParser) -> None:
    """Add the options for the operators of a serving step besides its MoE layers."""
    options = {
        "--config FILE": (
            "the model's Hugging Face config.json, or a model of the catalogue (default: as --model or the model is called)",
            {"type": str},
        ),
        "--operators": (
            "what times attention, dense layers and head (default: aiconfigurator where it knows GPU and model)",
            {"choices": ("aiconfigurator", "datasheet")},
        ),
    }
    add_options(command, options)


def add_cluster(command: argparse.ArgumentParser) -> None:
    """Add the options for the place of a launch on a cluster."""
    group = command.add_argument_group("slurm and kubernetes")
    for name, (kind, metavar, help) in CLUSTER.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=help)
    group.add_argument("--submit", action="store_true", help="submit the job instead of printing what would be submitted")
