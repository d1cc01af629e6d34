"""The tables of every family against the real Transformers classes, built on the meta device.

A family is wrong here long before it is wrong on a GPU: the inventory must count every parameter of the class, the
defaults must be those of the configuration class, and each line of a tp_plan must name modules that exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers

from enfold.config import EncoderFacts
from enfold.encoders import FAMILIES, family_of, packs_patches, parts, read_facts, supported, tower_of
from enfold.encoders.qwen_vl import MODELS
from enfold.errors import ConfigError, UnknownFamilyError

SMALL = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 200, "num_hidden_layers": 3}
GQA = {**SMALL, "num_key_value_heads": 2, "vocab_size": 301}
T5_SMALL = {"d_model": 96, "num_heads": 6, "d_kv": 24, "d_ff": 200, "num_layers": 3, "vocab_size": 301}
TEXT = {**SMALL, "vocab_size": 301, "max_position_embeddings": 33}
UNPADDED = {**TEXT, "pad_token_id": 0}
IMAGE = {**SMALL, "image_size": 64, "patch_size": 8}
TINY_QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 60, "num_heads": 4, "out_hidden_size": 96}
TINY_QWEN3_VISION = {**TINY_QWEN_VISION, "num_position_embeddings": 49, "patch_size": 8, "in_channels": 1}
QWEN3_VL_4B = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560}
QWEN3_VL_8B = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096}
QWEN2_5_VL_7B = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
QWEN2_VL_2B = {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4}


@dataclass(frozen=True)
class Case:
    model: str
    config: str
    sizes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}-{'-'.join(map(str, self.sizes)) or 'defaults'}"[:70]


def both_towers(text: dict[str, Any], image: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    return {"text_config": text, "vision_config": image, **sizes}


CASES = [
    *[Case("T5EncoderModel", "T5Config", sizes) for sizes in ({}, T5_SMALL, {"feed_forward_proj": "gated-gelu"})],
    *[Case("MT5EncoderModel", "MT5Config", sizes) for sizes in ({}, T5_SMALL, {"feed_forward_proj": "relu"})],
    *[Case("UMT5EncoderModel", "UMT5Config", sizes) for sizes in ({}, T5_SMALL, {"feed_forward_proj": "relu"})],
    *[Case("CLIPTextModel", "CLIPTextConfig", sizes) for sizes in ({}, TEXT)],
    *[Case("CLIPTextModelWithProjection", "CLIPTextConfig", sizes) for sizes in ({}, {**TEXT, "projection_dim": 40})],
    *[Case("CLIPVisionModel", "CLIPVisionConfig", sizes) for sizes in ({}, IMAGE)],
    *[Case("CLIPVisionModelWithProjection", "CLIPVisionConfig", sizes) for sizes in ({}, IMAGE)],
    *[Case("CLIPModel", "CLIPConfig", sizes) for sizes in ({}, both_towers(TEXT, IMAGE, projection_dim=40))],
    *[Case("SiglipTextModel", "SiglipTextConfig", sizes) for sizes in ({}, {**TEXT, "projection_size": 40})],
    *[Case("SiglipVisionModel", "SiglipVisionConfig", sizes) for sizes in ({}, {**IMAGE, "vision_use_head": False})],
    *[Case("SiglipModel", "SiglipConfig", sizes) for sizes in ({}, both_towers(TEXT, IMAGE))],
    *[Case("Siglip2TextModel", "Siglip2TextConfig", sizes) for sizes in ({}, TEXT)],
    *[
        Case("Siglip2VisionModel", "Siglip2VisionConfig", sizes)
        for sizes in ({}, {**SMALL, "patch_size": 8, "num_patches": 49})
    ],
    *[Case("Siglip2Model", "Siglip2Config", sizes) for sizes in ({}, both_towers(TEXT, {**SMALL, "num_patches": 49}))],
    *[
        Case("ViTModel", "ViTConfig", sizes)
        for sizes in ({}, {**IMAGE, "qkv_bias": False, "pooler_output_size": 40}, {"image_size": [64, 96]})
    ],
    *[
        Case("Dinov2Model", "Dinov2Config", sizes)
        for sizes in (
            {},
            {**IMAGE, "mlp_ratio": 3, "use_mask_token": False},
            {"use_swiglu_ffn": True, "hidden_size": 1536, "num_attention_heads": 24, "num_hidden_layers": 2},
        )
    ],
    *[
        Case(f"{name}Model", f"{name}Config", sizes)
        for name in ("Bert", "Roberta", "XLMRoberta")
        for sizes in ({}, {**TEXT, "type_vocab_size": 1})
    ],
    *[
        Case("ModernBertModel", "ModernBertConfig", sizes)
        for sizes in ({}, UNPADDED, {**UNPADDED, "attention_bias": True, "mlp_bias": True, "norm_bias": True})
    ],
    *[
        Case(f"{name}{suffix}", f"{name}Config", sizes)
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2")
        for suffix in ("Model", "ForCausalLM")
        for sizes in ({}, GQA, {**GQA, "head_dim": 32, "tie_word_embeddings": name == "Llama"})
    ],
    *[
        Case(f"{name}Model", f"{name}Config", {**GQA, "num_key_value_heads": None})
        for name in ("Llama", "Qwen2", "Qwen3")
    ],
    Case("LlamaModel", "LlamaConfig", {**GQA, "attention_bias": True, "mlp_bias": True}),
    Case("Qwen3Model", "Qwen3Config", {**GQA, "attention_bias": True}),
    Case("Gemma2Model", "Gemma2Config", {**GQA, "attention_bias": True}),
    *[Case("Gemma3TextModel", "Gemma3TextConfig", sizes) for sizes in ({}, {**GQA, "head_dim": 32})],
    *[Case("Gemma3ForCausalLM", "Gemma3TextConfig", {**GQA, "tie_word_embeddings": tied}) for tied in (True, False)],
    *[Case("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", sizes) for sizes in ({}, GQA)],
    *[
        Case(f"Qwen2_5_VL{suffix}", "Qwen2_5_VLConfig", sizes)
        for suffix in ("Model", "ForConditionalGeneration")
        for sizes in ({}, both_towers(GQA, TINY_QWEN_VISION), both_towers(GQA, {}, tie_word_embeddings=True))
    ],
    *[
        Case(f"Mistral3{suffix}", "Mistral3Config", sizes)
        for suffix in ("Model", "ForConditionalGeneration")
        for sizes in (
            {},
            both_towers(
                {**GQA, "model_type": "mistral"}, {**SMALL, "model_type": "pixtral"}, tie_word_embeddings=False
            ),
            {"multimodal_projector_bias": True, "vision_feature_layer": [-1, -2], "spatial_merge_size": 3},
        )
    ],
    *[
        Case(f"Gemma3{suffix}", "Gemma3Config", sizes)
        for suffix in ("Model", "ForConditionalGeneration")
        for sizes in (
            {},
            both_towers(
                GQA, {**IMAGE, "model_type": "siglip_vision_model"}, tie_word_embeddings=False, mm_tokens_per_image=4
            ),
        )
    ],
    *[
        Case("Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig", sizes)
        for sizes in (
            {},
            QWEN2_VL_2B,
            {"depth": 2, "embed_dim": 48, "hidden_size": 80, "mlp_ratio": 3, "num_heads": 4, "spatial_merge_size": 3},
        )
    ],
    *[
        Case("Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig", sizes)
        for sizes in (
            {},
            QWEN2_5_VL_7B,
            {**TINY_QWEN_VISION, "patch_size": 8, "temporal_patch_size": 3, "fullatt_block_indexes": [1, 7]},
        )
    ],
    *[
        Case(f"{name}VisionModel", f"{name}VisionConfig", sizes)
        for name in ("Qwen3VL", "Qwen3VLMoe")
        for sizes in (
            {},
            QWEN3_VL_8B,
            {**QWEN3_VL_4B, "deepstack_visual_indexes": [5, 11, 17]},
            {**TINY_QWEN3_VISION, "deepstack_visual_indexes": [1, 0, 9]},
            {**TINY_QWEN3_VISION, "deepstack_visual_indexes": [], "spatial_merge_size": 1},
        )
    ],
    *[
        Case(f"{name}VisionModel", f"{name}VisionConfig", sizes)
        for name in ("Qwen3_5", "Qwen3_5Moe")
        for sizes in ({}, QWEN3_VL_8B, {**TINY_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]})
    ],
]


def model_class(model: str, config: str) -> Any:
    """Find a model class beside its config class: Transformers does not export every tower."""
    home = getattr(transformers, config).__module__.replace(".configuration_", ".modeling_")
    return getattr(import_module(home), model)


def config_of(case: Case) -> Any:
    return getattr(transformers, case.config)(**case.sizes)


def facts_of(case: Case) -> EncoderFacts:
    return read_facts({**config_of(case).to_dict(), "architectures": [case.model]})


@cache
def module_sizes(index: int) -> tuple[int, frozenset[str]]:
    """Build a case on the meta device: its number of parameters (shared ones once) and its linear layers and tables."""
    case = CASES[index]
    with torch.device("meta"):
        model = model_class(case.model, case.config)(config_of(case))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = (torch.nn.Linear, torch.nn.Embedding)
    return num_parameters, frozenset(name for name, child in model.named_modules() if isinstance(child, layers))


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(str, CASES))
def test_inventory_counts_every_parameter_of_the_class(index: int) -> None:
    assert facts_of(CASES[index]).num_parameters == module_sizes(index)[0]


@pytest.mark.parametrize("name", sorted({(case.model, case.config) for case in CASES}))
def test_a_bare_model_type_reads_like_the_class_defaults(name: tuple[str, str]) -> None:
    full = getattr(transformers, name[1])().to_dict()
    bare = {"model_type": full["model_type"], "architectures": [name[0]]}
    assert read_facts(bare) == read_facts({**full, "architectures": [name[0]]})


def test_every_model_type_has_a_case() -> None:
    tried = {config_of(case).model_type for case in CASES}
    assert tried == {model_type for family in FAMILIES for model_type in family.model_types}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.tp_plan], ids=lambda family: family.name)
def test_every_line_of_a_tp_plan_names_modules(family: Any) -> None:
    cases = [index for index, case in enumerate(CASES) if family_of(config_of(case).model_type) is family]
    names = frozenset().union(*(module_sizes(index)[1] for index in cases))
    for pattern in family.tp_plan:
        regex = re.compile(rf"(.*\.)?{re.escape(pattern).replace(re.escape('*'), '[0-9]+')}")
        assert any(regex.fullmatch(name) for name in names), pattern
        assert not any("pool" in name or "head." in name for name in names if regex.fullmatch(name)), pattern


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if not family.tp_plan], ids=lambda family: family.name
)
def test_families_without_a_table_ship_one_with_their_config(family: Any) -> None:
    index, case = next((i, c) for i, c in enumerate(CASES) if family_of(config_of(c).model_type) is family)
    config = config_of(case).get_text_config()
    assert config.base_model_tp_plan
    names = module_sizes(index)[1]
    for pattern, style in config.base_model_tp_plan.items():
        if style in ("colwise", "rowwise"):
            assert any(re.search(re.escape(pattern).replace(re.escape("*"), "[0-9]+") + "$", name) for name in names)


@pytest.mark.parametrize(
    ("model_type", "leaf", "num_fused"), [("modernbert", "Wqkv", 3), ("modernbert", "Wi", 2)], ids=["qkv", "mlp"]
)
def test_fused_layers_say_how_many_they_hold(model_type: str, leaf: str, num_fused: int) -> None:
    family = family_of(model_type)
    assert family is not None
    assert family.num_fused is not None
    assert family.num_fused[leaf] == num_fused
    assert num_fused in {weight.num_fused for weight in read_facts({"model_type": model_type}).weights}


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.encoder_class], ids=lambda family: family.name
)
def test_encoder_class_exists(family: Any) -> None:
    case = next(case for case in CASES if family_of(config_of(case).model_type) is family)
    assert issubclass(model_class(family.encoder_class, case.config), transformers.PreTrainedModel)


def test_head_of_a_tied_model_is_counted_once() -> None:
    config = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    head = next(weight for weight in read_facts(config).weights if weight.name == "lm_head")
    assert head.tied
    assert read_facts(config).num_parameters == read_facts({"model_type": "gemma2"}).num_parameters
    untied = read_facts({**config, "tie_word_embeddings": False})
    assert untied.num_parameters == read_facts(config).num_parameters + head.num_parameters


def test_qwen2_5_vl_reads_flat_files_from_before_v5() -> None:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 60, "num_heads": 4, "in_chans": 3}
    flat = {"model_type": "qwen2_5_vl", **GQA, "vision_config": vision, "torch_dtype": "bfloat16"}
    nested = {"model_type": "qwen2_5_vl", "text_config": GQA, "vision_config": vision, "dtype": "bfloat16"}
    assert read_facts(flat) == read_facts(nested)
    assert read_facts(flat).dtype == "bfloat16"
    assert read_facts(flat).num_kv_heads == 2


def test_hub_style_gemma3_leaves_out_what_equals_the_default() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    vision = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16}
    vision |= {"model_type": "siglip_vision_model", "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}
    facts = read_facts(
        {"model_type": "gemma3", "text_config": text, "vision_config": vision, "torch_dtype": "bfloat16"}
    )
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.vocab_size) == (8, 4, 256, 262208)
    assert {weight.heads for weight in facts.weights} == {None, (16, 16)}


@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16", torch.bfloat16])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_both_keys(key: str, value: object) -> None:
    assert read_facts({"model_type": "t5", key: value}).dtype == "bfloat16"


def test_parts_of_a_two_tower_config() -> None:
    config = {"model_type": "clip", "text_config": {"hidden_size": 768, "num_attention_heads": 12}, "dtype": "float16"}
    facts = {name: read_facts(part) for name, part in parts(config).items()}
    assert {name: (fact.family, fact.hidden_size, fact.dtype) for name, fact in facts.items()} == {
        "text": ("CLIP text", 768, "float16"),
        "vision": ("CLIP vision", 768, "float16"),
    }
    tower = parts({**config, "architectures": ["CLIPVisionModelWithProjection"]})
    assert read_facts(tower[""]).family == "CLIP vision"
    assert parts({"model_type": "t5"}) == {"": {"model_type": "t5"}}


TOWER_CASES = [index for index, case in enumerate(CASES) if tower_of(config_of(case).model_type) is not None]


@pytest.mark.parametrize("index", TOWER_CASES, ids=lambda index: str(CASES[index]))
def test_a_tower_is_as_its_table_says(index: int) -> None:
    config = config_of(CASES[index])
    tower = tower_of(config.model_type)
    assert tower is not None
    sizes, facts = tower.read(config.to_dict()), read_facts(config.to_dict())
    with torch.device("meta"):
        model = model_class(CASES[index].model, CASES[index].config)(config)
    assert model.get_submodule(tower.patch_embed).weight.shape.numel() == sizes.hidden_size * sizes.patch_features
    layers = model.get_submodule(tower.layers)
    assert (len(layers), sizes.hidden_size) == (sizes.num_layers, facts.hidden_size)
    assert sizes.head_dim * sizes.num_heads == sizes.hidden_size
    for name in (tower.norm1, tower.attention, tower.norm2):
        assert hasattr(layers[0], name)
    if tower.takes == "images":
        assert sizes.fixed_grid is not None
        assert model.get_submodule(tower.pos_embed).weight.shape[0] == sizes.fixed_grid[0] * sizes.fixed_grid[1]
        return
    deepstack = model.get_submodule(tower.deepstack) if sizes.tap_layers else ()
    mergers = [model.get_submodule(tower.merger), *deepstack]
    assert len(mergers) == 1 + len(sizes.tap_layers)
    last = [[child for child in merger.modules() if isinstance(child, torch.nn.Linear)][-1] for merger in mergers]
    assert {layer.out_features for layer in last} == {sizes.out_features}
    assert {layer.in_features for layer in last} == {sizes.hidden_size * sizes.merge_size**2}
    assert sizes.patch_size == config.patch_size
    assert sizes.rope_theta == config.rope_parameters["rope_theta"]


VLM_CONFIGS = {
    "qwen2_vl": "Qwen2VLConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen3_vl": "Qwen3VLConfig",
    "qwen3_vl_moe": "Qwen3VLMoeConfig",
    "qwen3_5": "Qwen3_5Config",
    "qwen3_5_moe": "Qwen3_5MoeConfig",
}


@pytest.mark.parametrize("model_type", MODELS)
def test_parts_of_a_vision_language_model(model_type: str) -> None:
    config = getattr(transformers, VLM_CONFIGS[model_type])(dtype="bfloat16")
    found = parts(config.to_dict())
    assert list(found) == (["text", "vision"] if model_type == "qwen2_5_vl" else ["vision"])
    vision = read_facts(found["vision"])
    assert (vision.model_type, vision.dtype) == (f"{model_type}_vision", "bfloat16")
    assert vision == read_facts({**config.vision_config.to_dict(), "dtype": "bfloat16"})
    assert packs_patches(vision.model_type)


@pytest.mark.parametrize("model_type", MODELS)
def test_old_files_name_the_tower_like_the_model(model_type: str) -> None:
    sizes: dict[str, Any] = {"depth": 2, "num_heads": 4, "model_type": model_type}
    real = getattr(transformers, VLM_CONFIGS[model_type])(vision_config=dict(sizes)).vision_config.to_dict()
    for config in ({"model_type": model_type, "vision_config": sizes}, sizes):
        found = parts(config)
        assert set(found) == ({"", "text", "vision"} & set(found))
        tower = found["vision" if "vision_config" in config else ""]
        assert read_facts(tower) == read_facts(real)


def test_a_vision_language_model_without_sections_is_the_class_default() -> None:
    assert read_facts(parts({"model_type": "qwen3_vl"})["vision"]) == read_facts({"model_type": "qwen3_vl_vision"})


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16", "vision_config": {"dtype": "float32"}}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None, "vision_config": {"dtype": None}, "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"vision_config": {"torch_dtype": "float16"}, "text_config": {"dtype": "bfloat16"}}, "float16"),
        ({}, "float32"),
    ],
    ids=["the model's wins", "old key", "the language model's", "its own", "none"],
)
def test_precision_of_a_tower(config: dict[str, Any], dtype: str) -> None:
    assert read_facts(parts({"model_type": "qwen3_vl", **config})["vision"]).dtype == dtype


def test_the_whole_models_precision_counts_where_a_section_has_none() -> None:
    config = transformers.CLIPConfig(dtype="bfloat16").to_dict()
    assert config["vision_config"]["dtype"] is None
    assert {read_facts(part).dtype for part in parts(config).values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("model_type", "name", "family"),
    [
        ("qwen3_vl", "Qwen3VLVisionModel", "Qwen3-VL vision"),
        ("qwen3_5_moe", "Qwen3_5MoeVisionModel", "Qwen3.5 vision"),
        ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2.5-VL vision"),
        ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2-VL vision"),
        ("qwen2_5_vl", "Qwen2_5_VLTextModel", "Qwen2.5-VL"),
    ],
)
def test_a_class_that_is_one_tower_is_that_tower(model_type: str, name: str, family: str) -> None:
    found = parts({"model_type": model_type, "architectures": [name]})
    assert list(found) == [""]
    assert read_facts(found[""]).family == family


def test_a_text_class_of_a_model_whose_text_is_no_encoder_still_has_the_tower() -> None:
    assert list(parts({"model_type": "qwen3_vl", "architectures": ["Qwen3VLTextModel"]})) == ["vision"]


def test_a_tower_of_another_kind_is_not_taken_for_the_models_own() -> None:
    vision = {"model_type": "siglip_vision_model"}
    assert read_facts(parts({"model_type": "qwen3_vl", "vision_config": vision})["vision"]).family == "SigLIP vision"
    with pytest.raises(UnknownFamilyError, match="'pixtral'"):
        read_facts(parts({"model_type": "qwen3_vl", "vision_config": {"model_type": "pixtral"}})["vision"])


def test_qwen3_5_has_no_deepstack_whatever_the_config_says() -> None:
    plain = {"model_type": "qwen3_5_vision"}
    assert read_facts({**plain, "deepstack_visual_indexes": [8, 16, 24]}) == read_facts(plain)
    tower = tower_of("qwen3_5_vision")
    assert tower is not None
    assert tower.read({**plain, "deepstack_visual_indexes": [8, 16, 24]}).tap_layers == ()


def test_a_tower_inside_a_text_encoder_has_the_towers_own_sizes_and_stays_whole() -> None:
    vision = {"depth": 2, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 384}
    whole = read_facts({"model_type": "qwen2_5_vl", "text_config": GQA, "vision_config": vision})
    text = read_facts({"model_type": "qwen2_5_vl_text", **GQA})
    tower = read_facts({"model_type": "qwen2_5_vl_vision", **vision})
    assert whole.num_parameters == text.num_parameters + tower.num_parameters
    assert {weight.split for weight in whole.weights[len(text.weights) :]} == {"whole"}


@pytest.mark.parametrize("takes", ["patches", "images"])
def test_which_towers_pack_patches(takes: str) -> None:
    families = {family.name for family in FAMILIES if family.tower and family.tower.takes == takes}
    qwen = {"Qwen2-VL vision", "Qwen2.5-VL vision", "Qwen3-VL vision"}
    assert families == (qwen if takes == "patches" else {"SigLIP vision"})
    assert not packs_patches("siglip_vision_model")
    assert not packs_patches("t5")
    assert tower_of("gpt2") is tower_of("clip_vision_model") is None


def test_frame_cost_counts_windows() -> None:
    def sizes(model_type: str, **config: Any) -> Any:
        tower = tower_of(model_type)
        assert tower is not None
        return tower.read({"model_type": model_type, **config})

    full = sizes("qwen3_vl_vision", hidden_size=64, intermediate_size=128)
    assert full.frame_cost(10, 20) == 200 * (200 + 2 * 64 + 128)
    windows = sizes("qwen2_5_vl_vision", hidden_size=64, intermediate_size=128, depth=4, fullatt_block_indexes=[3])
    assert windows.window_side == 4
    assert windows.frame_cost(10, 20) == 200 * (0.25 * 200 + 0.75 * 64 + 2 * 64 + 1.5 * 128)
    assert windows.frame_cost(4, 4) == 16 * (16 + 2 * 64 + 1.5 * 128)


def test_a_layer_beyond_the_last_has_no_window_to_leave() -> None:
    tower = tower_of("qwen2_5_vl_vision")
    assert tower is not None
    assert tower.read({"depth": 8, "fullatt_block_indexes": [1, 7, 15]}).full_layers == (1, 7)


def test_old_clip_files_let_text_config_dict_win() -> None:
    config = {"model_type": "clip", "text_config": {"hidden_size": 64}, "text_config_dict": {"hidden_size": 768}}
    real = transformers.CLIPConfig(**config)
    assert read_facts(parts(config)["text"]).hidden_size == real.text_config.hidden_size == 768


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"model_type": "bert", "hidden_size": "x"}, "hidden_size='x'"),
        ({"model_type": "bert", "hidden_size": 0}, "hidden_size=0"),
        ({"model_type": "llama", "num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"model_type": "t5", "d_model": True}, "d_model=True"),
        ({"model_type": "t5", "d_ff": 10.5}, "d_ff=10.5"),
        ({"model_type": "bert", "num_attention_heads": 7}, "num_attention_heads=7 does not divide hidden_size=768"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "num_key_value_heads=5 does not divide"),
        ({"model_type": "clip_vision_model", "image_size": [1, 2, 3]}, "image_size"),
        ({"model_type": "vit", "qkv_bias": "no"}, "qkv_bias='no'"),
        ({"model_type": "dinov2", "mlp_ratio": "4"}, "mlp_ratio='4'"),
        ({"model_type": "mistral3", "text_config": [1]}, "text_config=[1]"),
        ({"model_type": "t5", "dtype": "int3"}, "dtype='int3'"),
        ({"model_type": "qwen3_vl_vision", "depth": 0}, "depth=0"),
        ({"model_type": "qwen3_vl_vision", "num_heads": 7}, "num_attention_heads=7 does not divide hidden_size=1152"),
        ({"model_type": "qwen3_vl_vision", "num_position_embeddings": 50}, "num_position_embeddings=50 is no square"),
        ({"model_type": "qwen3_vl_vision", "deepstack_visual_indexes": 8}, "deepstack_visual_indexes=8"),
        ({"model_type": "qwen3_vl_vision", "deepstack_visual_indexes": [8, 8]}, "deepstack_visual_indexes=[8, 8]"),
        ({"model_type": "qwen3_vl_vision", "deepstack_visual_indexes": [-1]}, "deepstack_visual_indexes=[-1]"),
        ({"model_type": "qwen3_vl_vision", "deepstack_visual_indexes": [True]}, "deepstack_visual_indexes=[True]"),
        ({"model_type": "qwen3_vl_vision", "patch_size": [14, 16]}, "patch_size=[14, 16] can't be used"),
        ({"model_type": "qwen3_vl_vision", "rope_parameters": {"rope_theta": 0}}, "rope_theta=0"),
        ({"model_type": "qwen3_vl_vision", "rope_parameters": 3}, "rope_parameters=3"),
        ({"model_type": "qwen2_vl_vision", "mlp_ratio": 2.5}, "mlp_ratio=2.5"),
        ({"model_type": "qwen2_5_vl_vision", "window_size": 20}, "window_size=20 is smaller than 2 patches of 14"),
        ({"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": -1}}, "hidden_size=-1"),
        ({"model_type": 3}, "model_type=3"),
        ({}, "model_type=None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_value_is_named(broken: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_facts(broken)


def test_an_unknown_family_lists_what_is_supported() -> None:
    with pytest.raises(UnknownFamilyError, match=r"'gpt2'.*replicate and dp still work.*BERT.*T5"):
        read_facts({"model_type": "gpt2"})
    with pytest.raises(UnknownFamilyError, match=r"'llama'.*'mistral'"):
        read_facts({"model_type": "mistral3", "text_config": {"model_type": "llama"}})
    assert supported() == sorted(supported(), key=str.lower)
    assert family_of("gpt2") is None
