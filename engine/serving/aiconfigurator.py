"""Operators by the compiled engine of aiconfigurator-core: interpolated between its measurements of SGLang's kernels.

Its graph of a model gives attention, normalisation and embedding; the GEMMs of shared experts, dense layers and head are asked
for by their sizes, because its own graphs count every layer as an MoE layer, and the one for wide expert parallelism leaves
the head out. Its MoE operators are not used: those layers are simulated. Where it cannot time a step, the datasheet does
(`choose_operators`).
"""

import contextlib
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.catalogue.packaged import installed_folder, packaged_gpu_types
from engine.cluster import Cluster, Gpu
from engine.costs.silicon import MACHINES, folder_of, installed_package
from engine.errors import InputError
from engine.model import MoEModel
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import TransformerSizes
from engine.serving.step import Kind, Operator, Operators, OperatorsOfTypes, OperatorSource, ServingStep, computing

BACKEND = "sglang"
WIDE, NODE = {"context": "deepep_ht", "generation": "deepep_ll"}, 8
"""Its names of DeepEP's kernels by phase, and the GPUs of a node, in a graph for wide expert parallelism."""
ELEMENT_WISE_SHARE = 0.8
"""Share of memory bandwidth with which its own graphs have activation functions run."""

ATTENTION = re.compile("attention|mla|qkv|proj|downscale|bmm|rope|q_a_|q_b_|kv_|dsa|kda|gdn|conv")
LEFT_OUT = re.compile("moe|shared|router|logits|p2p|ffn|mlp|act_gate|dispatch|combine|_ar|latent")
"""Parts of the names of its operators that are simulated, that are timed by size, or that one GPU of data-parallel attention
does not have."""


@dataclass(frozen=True)
class AiconfiguratorOperators:
    """Operators timed by the package. Raises InputError if it does not know the GPU, the model or a size.

    config: the model's `config.json`, which its graph is built from
    model, sizes: the same as read by our own formats
    gpu_type: of our catalogue
    """

    config: Path
    model: MoEModel
    sizes: TransformerSizes
    gpu_type: str

    @property
    def source(self) -> str:
        return f"{installed_package()}, its compiled engine for {BACKEND} on {self.gpu_type}: interpolated measurements"

    def operators(self, step: ServingStep) -> tuple[Operator, ...]:
        if self.sizes.mixers:
            raise InputError(
                f"aiconfigurator's operators are not asked for layers of {self.sizes.mixers[0].name}; use the datasheet's"
            )
        engine = _compiled(self.config, self.model, self.sizes, self._system(), step.kv_dtype)
        model, sizes = self.model, self.sizes
        shared = model.shared_width
        gemms: list[tuple[str, Kind, int, int, bool]] = []
        if shared:
            gemms.append(("shared experts", "shared expert", shared, len(model.moe_layers), True))
        if model.dense_layers:
            gemms.append(("dense FFN", "dense FFN", sizes.dense_d_ff, len(model.dense_layers), True))
        rows = engine.graph(step) + engine.gemms([*gemms, ("output head", "head", sizes.vocabulary, 1, False)], step)
        return tuple(row for row in rows if row.seconds > 0)

    def _system(self) -> str:
        installed_folder("operators by aiconfigurator")
        if (folder := folder_of(self.gpu_type)) is not None:
            return folder
        known = ", ".join((*MACHINES, *packaged_gpu_types()))
        raise InputError(
            f"aiconfigurator has no measurements of {self.gpu_type} (it has {known}); use the datasheet's operators"
        )


@dataclass(frozen=True)
class _Engine:
    """A compiled graph.

    chosen: by phase, the indices of its operators that are used
    quantisation: of the model's GEMMs
    """

    handle: Any
    chosen: dict[str, list[int]]
    model: MoEModel
    quantisation: Any

    def graph(self, step: ServingStep) -> list[Operator]:
        """Attention, normalisation and embedding."""
        chosen, sequences = self.chosen[step.phase], step.sequences
        if step.phase == "prefill":
            rows = self._asked(lambda: self.handle.evaluate_context_ops(chosen, batch_size=sequences, s=step.context))
        else:
            length = round(step.keys)
            rows = self._asked(lambda: self.handle.evaluate_generation_ops(chosen, batch_size=sequences, s=length))
        timed = []
        for name, milliseconds, _, origin in rows:
            kind = _kind(plain := _plain(name))
            layers = 1 if kind == "embedding" else self.model.layers
            timed.append(Operator(plain, kind, milliseconds * 1e-3, layers, origin))
        return timed

    def gemms(self, wanted: list[tuple[str, Kind, int, int, bool]], step: ServingStep) -> list[Operator]:
        """FFNs and head by their sizes."""
        from aiconfigurator_core.sdk import common, engine, operations

        model, timed = self.model, []
        for name, kind, width, layers, is_ffn in wanted:
            tokens = step.tokens if is_ffn else step.head_rows
            if is_ffn:
                inner = (model.ffn_matrices - 1) * width
                parts = [
                    operations.GEMM(f"{name} in", layers, inner, model.d_model, self.quantisation),
                    operations.ElementWise(f"{name} activation", layers, inner, width, ELEMENT_WISE_SHARE),
                    operations.GEMM(f"{name} out", layers, model.d_model, width, self.quantisation),
                ]
            else:
                parts = [operations.GEMM(name, layers, width, model.d_model, common.GEMMQuantMode.bfloat16)]
            rows = self._asked(
                lambda parts=parts, tokens=tokens: self.handle.evaluate_ops_json(
                    engine.build_ops_json(parts), is_context=False, batch_size=tokens, s=1
                )
            )
            origins = {row[3] for row in rows if row[1] and not row[0].endswith("activation")}
            origin = origins.pop() if len(origins) == 1 else "mixed"
            timed.append(Operator(name, kind, sum(row[1] for row in rows) * 1e-3, layers, origin))
        return timed

    def _asked(self, question: Callable[[], list[tuple[str, float, float, str]]]) -> list[tuple[str, float, float, str]]:
        with _quietly(f"aiconfigurator cannot time {self.model.name}"):
            return question()


def _kind(name: str) -> Kind:
    if "norm" in name and "layernorm" not in name:
        return "norm"
    if "embedding" in name:
        return "embedding"
    return "attention" if ATTENTION.search(name) else "other"


def _plain(name: str) -> str:
    """The name without its phase."""
    return name.removeprefix("generation_").removeprefix("context_")


def _chosen(names: list[str]) -> list[int]:
    """Indices of the operators that are used. Its graph for wide expert parallelism has the down-projection of latent
    attention twice, under two names; it runs once."""
    twice = "downscale_gemm" if any(_plain(name) == "qkv_a_proj_gemm" for name in names) else None
    plain = [_plain(name) for name in names]
    return [index for index, name in enumerate(plain) if name != twice and not LEFT_OUT.search(name)]


@lru_cache(maxsize=32)
def _compiled(config: Path, model: MoEModel, sizes: TransformerSizes, system: str, kv_dtype: str) -> _Engine:
    """The graph with SGLang's attention for wide expert parallelism where there are measurements of it (latent attention in
    8-bit floats), else the usual one."""
    if sizes.latent and kv_dtype == "fp8":
        with contextlib.suppress(InputError):
            engine = _compile(config, model, system, kv_dtype, wide=True)
            for phase in ("decode", "prefill"):
                engine.graph(ServingStep(phase=phase, sequences=1, context=1024))
            return engine
    return _compile(config, model, system, kv_dtype, wide=False)


def _compile(config: Path, model: MoEModel, system: str, kv_dtype: str, wide: bool) -> _Engine:
    with _quietly(f"aiconfigurator has no {model.name} on {system}"), tempfile.TemporaryDirectory() as folder:
        from aiconfigurator_core.sdk import common, engine, perf_database
        from aiconfigurator_core.sdk.config_builders import build_model_config
        from aiconfigurator_core.sdk.models import get_model, resolve_context_fmha_by_data

        # A folder, because by any other name it would be fetched from the Hugging Face Hub.
        shutil.copyfile(config, Path(folder) / "config.json")
        quantised = config.with_name(config.name.replace("_config.json", "_hf_quant_config.json"))
        if quantised != config and quantised.is_file():
            shutil.copyfile(quantised, Path(folder) / "hf_quant_config.json")
        kv_mode = {"bf16": "bfloat16", "fp8": "fp8"}[kv_dtype]
        settings = build_model_config(1, 1, 1, 1, 1, kvcache_quant_mode=kv_mode)
        database_version = engine._literal_backend_version(system, BACKEND, None, None, None)
        if database_version is None:
            raise InputError(f"aiconfigurator has no measurements of {BACKEND} on {system}; use the datasheet's operators")
        database = perf_database.get_database(system, BACKEND, database_version)
        if wide:
            settings.moe_comm_backend, settings.num_gpus_per_node = WIDE, NODE
            settings.fmha_quant_mode, settings.system = common.FMHAQuantMode.fp8_block, system
        else:
            resolve_context_fmha_by_data(settings, folder, database, BACKEND, is_context_role=True)
        graph = get_model(folder, settings, BACKEND)
        handle = handle_of(graph, folder, system, database_version, database)
        parts = {"prefill": graph.context_ops, "decode": graph.generation_ops}
        chosen = {phase: _chosen([part._name for part in parts[phase]]) for phase in parts}
        return _Engine(handle, chosen, model, graph.config.gemm_quant_mode)


def handle_of(graph: Any, path: str, system: str, version: str, database: Any) -> Any:
    """The compiled engine of a graph.

    path: the graph's checkpoint or a folder with its config
    version: of the backend's measurements on the system, which are the database
    """
    import aiconfigurator_core
    from aiconfigurator_core.sdk import engine

    spec = engine.build_engine_spec_json(
        graph,
        model_path=path,
        system=system,
        backend=BACKEND,
        backend_version=version,
        kv_block_size=None,
        systems_path=None,
        nextn=0,
        database=database,
    )
    return engine.EngineHandle(bytes(aiconfigurator_core.engine_spec_bincode_from_json(spec)))


@contextlib.contextmanager
def _quietly(subject: str) -> Iterator[None]:
    """Hide the log of the package, and turn its errors into an InputError. They are of many classes of its own, and of all of
    Python's for models that it was not written for."""
    logger, nowhere = logging.getLogger("aiconfigurator_core"), logging.NullHandler()
    further, logger.propagate = logger.propagate, False
    logger.addHandler(nowhere)
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # The folder of the package is private, and its reasons may be long.
        words = [word for word in str(error).split() if "/site-packages/" not in word]
        reason = " ".join(words)[:200].rstrip() or type(error).__name__
        reason = f"its config lacks {reason}" if isinstance(error, KeyError) else reason
        raise InputError(f"{subject}: {reason}; use the datasheet's operators") from None
    finally:
        logger.removeHandler(nowhere)
        logger.propagate = further


OPERATORS = ("aiconfigurator", "datasheet")


def choose_operators(
    config: Path, model: MoEModel, sizes: TransformerSizes, gpu: Gpu, step: ServingStep, wanted: str | None = None
) -> tuple[OperatorSource, list[str]]:
    """The wanted source, one of OPERATORS, or without a wish the first that can time the step; and why it is not the first.

    config: the model's `config.json`. Raises InputError when the wanted source cannot time the step.
    """
    roofline = RooflineOperators(model, sizes, gpu)
    if wanted == "datasheet":
        return roofline, []
    measured = AiconfiguratorOperators(config, model, sizes, gpu.type)
    try:
        measured.operators(step.half() if step.overlap == "two-batch" else step)
    except InputError as error:
        if wanted:
            raise
        return roofline, [f"operators by the datasheet: {error}"]
    return measured, []


def choose_operators_of(
    config: Path | None,
    model: MoEModel,
    sizes: TransformerSizes,
    cluster: Cluster,
    step: ServingStep,
    wanted: str | None = None,
) -> tuple[Operators, list[str]]:
    """`choose_operators` for every type of GPU of a cluster.

    config: None: its file is not known, and the datasheet times all
    """
    kinds, sources, notes = {computing(gpu): gpu for gpu in cluster.gpus}, {}, {}
    for kind, gpu in kinds.items():
        if config is None:
            sources[kind] = RooflineOperators(model, sizes, gpu)
        else:
            sources[kind], said = choose_operators(config, model, sizes, gpu, step, wanted)
            notes |= dict.fromkeys(said)
    return next(iter(sources.values())) if len(sources) == 1 else OperatorsOfTypes(sources), list(notes)
