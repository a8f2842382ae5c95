"""Sizes read from every MoE config of aiconfigurator-core and of transformers, against the model that transformers builds from
it on the meta device, without weights."""

import json
import re

import pytest

from engine.catalogue.packaged import packaged_configs
from engine.errors import InputError
from engine.formats.huggingface import model_of_config, sizes_of_config
from engine.formats.huggingface.config import NAMES

OTHER_PARTS = re.compile(r"vision|visual|audio|image|multi_modal|projector|talker|mtp|perception|sound|relative_attention")
"""Parameters outside the language model."""

NO_LANGUAGE_MODEL = ("nllb-moe", "switch_transformers", "doge", "vitpose", "vitpose_backbone", "dots3_note_vision_encoder")
"""Encoders with decoders, of images, and product keys, none of which transformers' config gives experts per token."""

FLAT = ("step3p7", "minimax_m3")
"""Their packaged configs have no `text_config`, in which transformers looks for sizes."""

TYPES = {"kimi_k2": "deepseek_v3", "minimax_m3": "minimax_m3_vl"}
"""Types of packaged configs by the names that transformers has for them."""

NOT_READ = ("compress_ratios",)
"""Keys for which sizes outside the experts are refused in the packaged configs that can be built: of DeepSeek-V4."""

NOT_BUILT = ("deepseek_ref", "kimi_k3")
"""Types of packaged configs that transformers does not know: read, and held against nothing."""

LONGCAT = 1.5
"""transformers allocates the inward matrices of LongCat's experts for zero experts too: 768 of them for 512."""


def numbers_of(config):
    """(weights of routed experts, all matrices, widths of keys) of the language model that transformers builds, and True with
    an output head."""
    transformers = pytest.importorskip("transformers")
    import torch

    failure = None
    for kind in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        try:
            with torch.device("meta"):
                model = getattr(transformers, kind).from_config(config)
            break
        except Exception as error:  # this class is of another kind of model, or the defaults of the family are no model
            failure = failure or error
    else:
        pytest.skip(f"transformers cannot build it: {type(failure).__name__}")
    own = [(name, each) for name, each in model.named_parameters() if not OTHER_PARTS.search(name)]
    routed = [each for name, each in own if re.search(r"(^|\.)experts\.", name) and "shared" not in name and each.ndim > 1]
    matrices = [each for name, each in own if each.ndim > 1 and (each.shape[0] > 1 or "shared_expert_gate" in name)]
    keys = {each.shape[0] for name, each in own if re.search(r"(self_attn|mixer)\.k_proj\.weight", name)}
    return sum(each.numel() for each in routed), sum(each.numel() for each in matrices), keys


def held_against(config, data, path):
    """Read `data`, compare it with the model that `config` builds, and return the key for which sizes were refused, if any."""
    routed, matrices, keys = numbers_of(config)
    model = model_of_config(data, path)
    experts = len(model.moe_layers) * model.experts * model.numbers_per_expert
    if model.zero_experts:
        inward = experts * (model.ffn_matrices - 1) / model.ffn_matrices
        experts += inward * (LONGCAT - 1)
    assert experts == routed
    try:
        sizes = sizes_of_config(data, path)
    except InputError as error:
        return str(error).partition(", ")[2].partition(":")[0]
    assert experts + sum(sizes.weights(model)) == matrices
    if keys and not sizes.latent and not sizes.mixers:
        assert keys == {each.kv_heads * each.head_size for each in (sizes, sizes.in_windows)}
    return None


def with_experts():
    """Packaged checkpoints whose config counts experts, in any part."""
    counts = re.compile("|".join(f'"{name}": ([2-9]|[1-9][0-9])' for name in NAMES["experts"]))
    return sorted(name for name, path in packaged_configs().items() if counts.search(path.read_text()))


@pytest.mark.everything
@pytest.mark.parametrize("checkpoint", with_experts())
def test_packaged_configs_are_read_with_the_sizes_of_the_model_that_is_built(checkpoint):
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    path = packaged_configs()[checkpoint]
    data = json.loads(path.read_text())
    kind = TYPES.get(data["model_type"], data["model_type"])
    if kind not in mapping:
        assert kind in NOT_BUILT and model_of_config(data, path).experts > 1
        return
    plain = {key: value for key, value in data.items() if key not in ("quantization_config", "auto_map")}
    nested = {"text_config": plain} if data["model_type"] in FLAT else plain
    key = held_against(mapping[kind].from_dict(nested | {"model_type": kind}), data, path)
    assert key is None or key in NOT_READ


def families():
    """Model types of transformers whose default config counts experts."""
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    return sorted(set(mapping) - set(NO_LANGUAGE_MODEL))


@pytest.mark.everything
def test_families_of_transformers_are_read_with_the_sizes_of_the_model_that_is_built_or_a_key_is_named(tmp_path):
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    equal, refused = [], {}
    for family in families():
        try:
            config = mapping[family]()
        except Exception:  # needs arguments
            continue
        data = config.to_dict()
        try:
            model_of_config(data, tmp_path / "config.json")
        except InputError as error:
            if "is not an MoE model" not in str(error):
                refused[family] = str(error)
            continue
        try:
            key = held_against(config, data, tmp_path / "config.json")
        except pytest.skip.Exception:
            continue
        if key is None:
            equal.append(family)
        else:
            refused[family] = key
    assert len(equal) >= 51, sorted(equal)
    assert all(refused.values()), refused
