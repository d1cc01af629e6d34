from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.choice import DP_MIN_HIDDEN_SIZE, FOLD_MIN_HIDDEN_SIZE
from enfold.config import EncoderFacts
from enfold.encoders import parts, read_facts
from enfold.encoders.shares import rank_parameters, whole_parts
from enfold.errors import ConfigError, LayoutError, UnknownFamilyError
from enfold.layout import Layout, divisors
from enfold.plan import plan_encoder, plan_pipeline
from enfold.shard import cut_weights, plan_shards
from enfold.vision.config import VisionParallelConfig

T5_XXL = {
    "model_type": "t5",
    "d_model": 4096,
    "d_ff": 10240,
    "num_heads": 64,
    "num_layers": 24,
    "feed_forward_proj": "gated-gelu",
    "torch_dtype": "bfloat16",
}
CLIP_L = {"model_type": "clip_text_model", "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
GPT2 = {"model_type": "gpt2", "n_embd": 4096, "n_head": 32, "n_layer": 24}


def t5(hidden: int, **sizes: Any) -> dict[str, Any]:
    return {"model_type": "t5", "d_model": hidden, **sizes}


@pytest.mark.parametrize(
    ("hidden", "batch", "resolved"),
    [
        (FOLD_MIN_HIDDEN_SIZE, 1, "fold"),
        (FOLD_MIN_HIDDEN_SIZE - 1, 1, "replicate"),
        (FOLD_MIN_HIDDEN_SIZE, 2, "dp"),
        (FOLD_MIN_HIDDEN_SIZE, None, "fold"),
        (FOLD_MIN_HIDDEN_SIZE - 1, None, "dp"),
        (DP_MIN_HIDDEN_SIZE, 2, "dp"),
        (DP_MIN_HIDDEN_SIZE - 1, 2, "replicate"),
        (DP_MIN_HIDDEN_SIZE, None, "dp"),
        (DP_MIN_HIDDEN_SIZE - 1, None, "replicate"),
        (DP_MIN_HIDDEN_SIZE, 1, "replicate"),
    ],
)
def test_auto_follows_the_published_rules(hidden: int, batch: int | None, resolved: str) -> None:
    plan = plan_encoder(t5(hidden), "auto", 4, batch)
    expected = {"fold": Layout(tp=4), "dp": Layout(dp=4), "replicate": Layout(replicate=4)}[resolved]
    assert (plan.resolved, plan.layout, plan.mode) == (resolved, expected, "auto")
    assert str(hidden) in plan.reasons[0]
    assert plan.warnings == ()


def test_thresholds_are_the_published_ones() -> None:
    assert (FOLD_MIN_HIDDEN_SIZE, DP_MIN_HIDDEN_SIZE) == (4096, 1024)


@pytest.mark.parametrize(("mode", "resolved"), [("fold", "fold"), ("dp", "dp"), ("replicate", "replicate")])
@pytest.mark.parametrize("hidden", [512, 2048, 8192])
def test_an_explicit_mode_wins_over_the_rules(mode: str, resolved: str, hidden: int) -> None:
    plan = plan_encoder(t5(hidden), mode, 4, 8)
    assert plan.resolved == resolved
    assert plan.reasons == (f"{mode} was asked",)


@pytest.mark.parametrize("mode", ["auto", "replicate", "fold", "dp"])
def test_one_rank_is_replicate_and_says_so_where_more_was_asked(mode: str) -> None:
    plan = plan_encoder(T5_XXL, mode, 1, 4)
    assert (plan.resolved, plan.layout) == ("replicate", Layout())
    assert "1 rank" in plan.reasons[0]
    assert bool(plan.warnings) == (mode in ("fold", "dp"))


def test_dp_with_one_prompt_per_call_is_replicate_and_names_the_flag() -> None:
    plan = plan_encoder(T5_XXL, "dp", 4, batch_size=1)
    assert (plan.resolved, plan.layout) == ("replicate", Layout(replicate=4))
    assert plan.warnings == plan.reasons
    assert "--batching-max-size" in plan.warnings[0]
    assert plan_encoder(T5_XXL, "dp", 4).resolved == "dp", "an unknown batch size is no reason to decline"


@pytest.mark.parametrize(
    ("asked", "layout", "resolved"),
    [
        ({"tp_size": 2}, Layout(1, 2, 2), "combined"),
        ({"dp_size": 4}, Layout(1, 4, 1), "dp"),
        ({"tp_size": 4}, Layout(1, 1, 4), "fold"),
        ({"tp_size": 2, "dp_size": 1}, Layout(2, 1, 2), "combined"),
        ({"tp_size": 1, "dp_size": 1}, Layout(4, 1, 1), "replicate"),
        ({"layout": Layout(2, 2, 1)}, Layout(2, 2, 1), "combined"),
    ],
)
def test_sizes_override_the_mode(asked: dict[str, Any], layout: Layout, resolved: str) -> None:
    plan = plan_encoder(CLIP_L, "auto", 4, 8, **asked)
    assert (plan.layout, plan.resolved) == (layout, resolved)


def test_an_explicit_dp_layout_stays_and_warns_with_one_prompt() -> None:
    plan = plan_encoder(CLIP_L, "auto", 4, 1, dp_size=4)
    assert plan.layout == Layout(dp=4)
    assert "--batching-max-size" in plan.warnings[0]


@pytest.mark.parametrize(
    ("mode", "asked", "words"),
    [
        ("fold", {"layout": Layout(dp=4)}, "mode fold contradicts layout replicate 1 x dp 4 x tp 1"),
        ("dp", {"layout": Layout(tp=4)}, "mode dp contradicts"),
        ("replicate", {"tp_size": 2}, "mode replicate contradicts"),
        ("auto", {"tp_size": 3}, "tp_size=3 does not divide the 4 ranks; use one of 1, 2, 4"),
        ("auto", {"tp_size": 4, "dp_size": 2}, "tp_size=4 x dp_size=2 = 8 does not divide the 4 ranks"),
        ("auto", {"layout": Layout(dp=2)}, "needs 2 ranks, the replica has 4"),
        ("auto", {"layout": Layout(dp=4), "tp_size": 1}, "both given"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(mode: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        plan_encoder(T5_XXL, mode, 4, **asked)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"replica_size": 0}, LayoutError),
        ({"batch_size": 0}, LayoutError),
        ({"mode": "tensor"}, ConfigError),
        ({"dtype": "bf16"}, ConfigError),
        ({"numerics": "sloppy"}, ConfigError),
        ({"config": 3}, ConfigError),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        plan_encoder(**{"config": T5_XXL, **arguments})


def test_bytes_of_t5_xxl() -> None:
    plan = plan_encoder(T5_XXL, "fold", 4)
    norms = (2 * 24 + 1) * 4096
    assert plan.num_parameters == 4_762_310_656
    assert plan.replicate_bytes == 2 * 4_762_310_656
    assert plan.bytes_per_rank == 2 * ((4_762_310_656 - norms) // 4 + norms)
    assert plan_encoder(T5_XXL, "fold", 4, dtype="float32").bytes_per_rank == 2 * plan.bytes_per_rank
    assert plan_encoder(T5_XXL, "dp", 4).bytes_per_rank == plan.replicate_bytes
    assert plan_encoder(T5_XXL, "auto", 4, tp_size=2).layout == Layout(1, 2, 2)


def test_uneven_heads_and_features_count_the_fullest_rank() -> None:
    config = {"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 1}
    shares = rank_parameters(read_facts(config), 8)
    assert shares[0] == shares[3] > shares[4] == shares[7]
    assert plan_encoder(config, "fold", 8).bytes_per_rank == 4 * shares[0]
    assert plan_encoder(config, "fold", 8).whole_parts == ()
    wide = read_facts(t5(1024, d_ff=10250, num_heads=16, num_layers=1))
    assert rank_parameters(wide, 4)[3] - rank_parameters(wide, 4)[0] == (2570 - 2560) * 1024


def test_what_stays_whole_is_named_with_its_reason() -> None:
    plan = plan_encoder(CLIP_L, "fold", 16)
    assert "attention: 12 heads < 16 ranks" in plan.whole_parts
    assert "token embedding: 768 features are 12 units of 64 < 16 ranks" in plan.whole_parts
    tower = {"model_type": "gemma3", "vision_config": {"hidden_size": 2048, "num_attention_heads": 8}}
    assert "attention of the image tower: 8 heads < 16 ranks" in whole_parts(read_facts(tower), 16)


def test_fewer_key_value_heads_than_ranks_are_copied_not_refused() -> None:
    config = {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    plan = plan_encoder(config, "fold", 8)
    assert plan.whole_parts == ()
    assert (plan.num_heads, plan.num_kv_heads) == (28, 4)


def test_a_fold_that_shards_nothing_is_an_error() -> None:
    tiny = t5(32, num_heads=1, d_kv=8, d_ff=64, num_layers=1)
    with pytest.raises(LayoutError, match=r"fold over tp=2 would shard nothing \(.*1 heads < 2 ranks.*dp or replicate"):
        plan_encoder(tiny, "fold", 2)
    assert plan_encoder(tiny, "auto", 2).resolved == "replicate"


@pytest.mark.parametrize(
    ("mode", "batch", "resolved"),
    [("dp", 4, "dp"), ("replicate", 1, "replicate"), ("auto", 4, "dp"), ("auto", 1, "replicate"), ("auto", None, "dp")],
)
def test_an_unknown_family_runs_without_a_table(mode: str, batch: int | None, resolved: str) -> None:
    plan = plan_encoder(GPT2, mode, 4, batch)
    assert (plan.family, plan.resolved) == ("unknown (gpt2)", resolved)
    assert (plan.hidden_size, plan.num_heads, plan.num_layers) == (4096, 32, 24)
    assert plan.num_parameters is plan.bytes_per_rank is plan.replicate_bytes is None
    assert plan.summary()


@pytest.mark.parametrize("asked", [{"mode": "fold"}, {"tp_size": 2}, {"layout": Layout(dp=2, tp=2)}])
def test_an_unknown_family_is_not_folded(asked: dict[str, Any]) -> None:
    with pytest.raises(UnknownFamilyError, match=r"'gpt2'.*use dp or replicate.*ModernBERT"):
        plan_encoder(GPT2, replica_size=4, **asked)


def test_sizes_of_an_unknown_family_may_be_missing() -> None:
    plan = plan_encoder({"model_type": "x"}, "auto", 4)
    assert (plan.resolved, plan.hidden_size) == ("replicate", 0)
    nested = {"model_type": "x", "text_config": {"hidden_size": 2048}}
    assert plan_encoder(nested, "auto", 4, 2).resolved == "dp"


def test_config_may_be_a_mapping_facts_or_a_hugging_face_config() -> None:
    config = transformers.T5Config(d_model=4096, d_ff=10240, num_heads=64, num_layers=24)
    plans = [plan_encoder(form, "fold", 4) for form in (config, config.to_dict(), read_facts(config.to_dict()))]
    assert plans[0] == plans[1] == plans[2]


def test_plan_as_json_and_as_a_line() -> None:
    plan = plan_encoder(T5_XXL, "auto", 4, 1)
    document = json.loads(json.dumps(plan.to_json()))
    assert document["layout"] == {"replicate": 1, "dp": 1, "tp": 4}
    assert document["replica_size"] == 4
    line = plan.summary()
    assert "\n" not in line
    for word in ("T5", "fold", "asked: auto", "1x1x4", "2.22 GiB", "25%", "4096"):
        assert word in line


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 16),
    batch=st.none() | st.integers(1, 9),
    mode=st.sampled_from(["auto", "dp", "replicate", "fold"]),
    hidden=st.integers(1, 80),
    data=st.data(),
)
def test_every_plan_fits_its_ranks_and_never_holds_more_than_the_whole(
    ranks: int, batch: int | None, mode: str, hidden: int, data: st.DataObject
) -> None:
    tp = data.draw(st.none() | st.sampled_from(divisors(ranks)))
    config = t5(hidden * 64, num_heads=hidden, num_layers=2)
    try:
        plan = plan_encoder(config, mode, ranks, batch, tp_size=tp)
    except LayoutError as error:
        assert re.search(r"contradicts|shard nothing", str(error))
        return
    assert plan.layout.size == ranks
    assert plan.reasons
    assert plan.bytes_per_rank is not None and plan.replicate_bytes is not None
    assert (plan.bytes_per_rank < plan.replicate_bytes) == (plan.layout.tp > 1)


# Vision towers that pack images of any size.

QWEN3_VL_8B = {"model_type": "qwen3_vl_vision", "out_hidden_size": 4096, "dtype": "bfloat16"}
QWEN2_5_VL = {
    "model_type": "qwen2_5_vl",
    "text_config": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28},
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
}


def tower(**sizes: Any) -> dict[str, Any]:
    return {**QWEN3_VL_8B, **sizes}


@pytest.mark.parametrize("hidden", [64, 1152, 8192])
@pytest.mark.parametrize("batch", [None, 8])
def test_auto_spreads_the_images_of_a_tower_whatever_its_width(hidden: int, batch: int | None) -> None:
    plan = plan_encoder(tower(hidden_size=hidden), "auto", 4, batch)
    assert (plan.resolved, plan.layout, plan.warnings) == ("dp", Layout(1, 4, 1), ())
    assert plan.reasons == ("images of a call are spread over the 4 ranks, each with the whole tower",)
    assert plan.bytes_per_rank == plan.replicate_bytes


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_auto_is_the_default_of_the_vision_config(ranks: int) -> None:
    assert plan_encoder(QWEN3_VL_8B, "auto", ranks).layout == VisionParallelConfig().layout(ranks)


@pytest.mark.parametrize(
    ("mode", "layout", "reason"),
    [
        ("fold", Layout(tp=4), "4 ranks share each image and one copy of the weights, up to 4 of 16 heads each"),
        ("dp", Layout(dp=4), "images of a call are spread over the 4 ranks, each with the whole tower"),
        ("replicate", Layout(replicate=4), "each of the 4 ranks encodes every image"),
    ],
)
def test_modes_of_a_tower(mode: str, layout: Layout, reason: str) -> None:
    plan = plan_encoder(QWEN3_VL_8B, mode, 4)
    assert (plan.layout, plan.resolved, plan.reasons) == (layout, mode, (f"{mode} was asked: {reason}",))


@pytest.mark.parametrize(
    ("asked", "layout", "words"),
    [
        ({"tp_size": 2}, Layout(1, 2, 2), "spread over the 2 groups of 2; 2 ranks share each image"),
        ({"dp_size": 4}, Layout(1, 4, 1), "spread over the 4 ranks, each with the whole tower"),
        ({"tp_size": 4}, Layout(1, 1, 4), "up to 4 of 16 heads each"),
        ({"tp_size": 2, "dp_size": 1}, Layout(2, 1, 2), "2 copies of this repeat the same images"),
        ({"layout": Layout(4)}, Layout(4), "each of the 4 ranks encodes every image"),
    ],
)
def test_sizes_of_a_tower(asked: dict[str, Any], layout: Layout, words: str) -> None:
    plan = plan_encoder(QWEN3_VL_8B, "auto", 4, **asked)
    assert plan.layout == layout
    assert plan.reasons[0].startswith(f"layout {layout} was asked: ")
    assert words in plan.reasons[0]


def test_heads_that_do_not_divide_say_the_most() -> None:
    assert "up to 6 of 16 heads each" in plan_encoder(QWEN3_VL_8B, "fold", 3).reasons[0]


@pytest.mark.parametrize(("mode", "warns"), [("auto", False), ("dp", True)])
def test_one_image_per_call_leaves_ranks_idle_and_says_so(mode: str, warns: bool) -> None:
    plan = plan_encoder(QWEN3_VL_8B, mode, 4, batch_size=1)
    assert plan.layout == Layout(dp=4), "a video is spread by its frames"
    assert "computed by 1 of the 4 copies" in plan.reasons[1]
    assert "tp_size" in plan.reasons[1]
    assert plan.warnings == (plan.reasons[1:] if warns else ())
    assert plan_encoder(QWEN3_VL_8B, "fold", 4, batch_size=1).warnings == ()


def test_one_rank_has_nothing_to_spread() -> None:
    plan = plan_encoder(QWEN3_VL_8B, "auto", 1)
    assert (plan.layout, plan.reasons) == (Layout(), ("there is 1 rank: nothing to spread",))


@pytest.mark.parametrize(
    ("mode", "asked"), [("fold", {"dp_size": 4}), ("dp", {"tp_size": 4}), ("replicate", {"tp_size": 2})]
)
def test_a_mode_and_sizes_of_a_tower_may_not_contradict(mode: str, asked: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=f"mode {mode} contradicts layout"):
        plan_encoder(QWEN3_VL_8B, mode, 4, **asked)


def test_what_stays_whole_in_a_tower_is_named() -> None:
    narrow = tower(hidden_size=80, intermediate_size=120, num_heads=4, out_hidden_size=128)
    plan = plan_encoder(narrow, "fold", 5)
    assert "attention: 4 heads < 5 ranks" in plan.whole_parts
    assert "MLP up: 120 features are 1 units of 64 < 5 ranks" in plan.whole_parts
    assert "merger out: 128 features are 2 units of 64 < 5 ranks" in plan.whole_parts
    assert "deepstack merger out: 128 features are 2 units of 64 < 5 ranks" in plan.whole_parts
    assert not any(part.startswith("merger in") for part in plan.whole_parts)
    assert plan_encoder(QWEN3_VL_8B, "fold", 16).whole_parts == ()
    with pytest.raises(LayoutError, match=r"fold over tp=32 would shard nothing \(.*4 heads < 32 ranks.*smaller tp"):
        plan_encoder(narrow, "fold", 32)


def test_a_siglip_tower_keeps_its_plan_by_rows() -> None:
    config = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}
    plan = plan_encoder(config, "auto", 4, 1)
    assert (plan.resolved, plan.reasons) == (
        "replicate",
        ("one image per call and hidden size 1152 < 4096: too narrow to fold",),
    )
    plan = plan_encoder(config, "auto", 4, 8)
    assert plan.reasons == ("up to 8 images per call and hidden size 1152 >= 1024",)


def test_a_model_whose_text_is_an_encoder_is_planned_as_before() -> None:
    plans = {name: plan_encoder(part, "fold", 4) for name, part in parts(QWEN2_5_VL).items()}
    assert plans["text"] == plan_encoder(QWEN2_5_VL, "fold", 4)
    assert plans["text"].notes == ("the vision tower (visual) stays whole on every rank",)
    assert plans["vision"].family == "Qwen2.5-VL vision"
    assert plans["vision"].num_parameters == 676_550_144


# The planner's arithmetic against what shard.py does to a real module on the meta device.

BERT = {"vocab_size": 301, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1026}
GQA = {**BERT, "num_key_value_heads": 2, "num_hidden_layers": 2}
IMAGE = {**BERT, "num_hidden_layers": 2, "image_size": 64, "patch_size": 8}
SHARDED = [
    ("T5EncoderModel", "T5Config", {"d_model": 320, "num_heads": 6, "d_ff": 1026, "num_layers": 2}),
    ("UMT5EncoderModel", "UMT5Config", {"d_model": 320, "num_heads": 6, "d_ff": 1026, "num_layers": 2}),
    ("CLIPTextModelWithProjection", "CLIPTextConfig", {**BERT, "num_hidden_layers": 2}),
    ("CLIPModel", "CLIPConfig", {"text_config": {**BERT, "num_hidden_layers": 2}, "vision_config": IMAGE}),
    ("SiglipVisionModel", "SiglipVisionConfig", {k: v for k, v in IMAGE.items() if k != "vocab_size"}),
    ("Siglip2TextModel", "Siglip2TextConfig", {**BERT, "num_hidden_layers": 2}),
    ("ViTModel", "ViTConfig", {"num_hidden_layers": 2}),
    ("Dinov2Model", "Dinov2Config", {"num_hidden_layers": 2, "use_swiglu_ffn": True}),
    ("BertModel", "BertConfig", {**BERT, "num_attention_heads": 6, "num_hidden_layers": 2}),
    ("ModernBertModel", "ModernBertConfig", {**BERT, "num_hidden_layers": 2, "pad_token_id": 0, "mlp_bias": True}),
    ("LlamaModel", "LlamaConfig", {**GQA, "attention_bias": True}),
    ("Qwen3Model", "Qwen3Config", GQA),
    ("Gemma2ForCausalLM", "Gemma2Config", GQA),
    ("Qwen2ForCausalLM", "Qwen2Config", GQA),
    (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": GQA,
            "vision_config": {**IMAGE, "num_attention_heads": 6, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"text_config": GQA, "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 384}},
    ),
    (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": {**GQA, "model_type": "mistral"},
            "vision_config": {
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 1,
                "model_type": "pixtral",
            },
        },
    ),
]

NARROW = {"depth": 2, "num_heads": 6, "hidden_size": 384, "intermediate_size": 1026, "out_hidden_size": 330}
SHARDED += [
    ("Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig", {"depth": 2, "embed_dim": 1280}),
    ("Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig", {"depth": 2, "hidden_size": 1280}),
    ("Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig", NARROW),
    ("Qwen3VLVisionModel", "Qwen3VLVisionConfig", {"out_hidden_size": 4096}),
    ("Qwen3VLVisionModel", "Qwen3VLVisionConfig", {**NARROW, "deepstack_visual_indexes": [1]}),
    ("Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionConfig", {"depth": 2, "deepstack_visual_indexes": [1, 0]}),
    ("Qwen3_5VisionModel", "Qwen3_5VisionConfig", {"depth": 2}),
    ("Qwen3_5MoeVisionModel", "Qwen3_5MoeVisionConfig", NARROW),
]


def meta_module(model: str, config: str, sizes: dict[str, Any]) -> tuple[Any, EncoderFacts]:
    config_class = getattr(transformers, config)
    config_object = config_class(**copy.deepcopy(sizes))
    home = import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    with torch.device("meta"):
        module = getattr(home, model)(config_object)
    return module, read_facts({**config_object.to_dict(), "architectures": [model]})


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize(("model", "config", "sizes"), SHARDED, ids=[case[0] for case in SHARDED])
def test_ranks_hold_what_the_planner_says(
    model: str, config: str, sizes: dict[str, Any], tp: int, numerics: Any
) -> None:
    held = []
    for rank in range(tp):
        module, facts = meta_module(model, config, sizes)
        cut_weights(module, plan_shards(module, tp, numerics), rank)
        held.append(sum(parameter.numel() for parameter in module.parameters()))
    assert held == rank_parameters(facts, tp, numerics)


# Pipelines.

FLUX = {
    "_class_name": "FluxPipeline",
    "_name_or_path": ["transformers", "NoModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "image_encoder": ["transformers", "CLIPVisionModelWithProjection"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
    "processor": ["transformers", "Qwen2VLProcessor"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "safety_checker": [None, None],
    "requires_safety_checker": False,
}
FLUX_CONFIGS = {"text_encoder": CLIP_L, "text_encoder_2": T5_XXL, "image_encoder": {"model_type": "clip"}}


def test_pipeline_plans_every_text_and_image_encoder() -> None:
    plans = plan_pipeline(FLUX, FLUX_CONFIGS.__getitem__, "auto", 4, 1)
    assert {name: (plan.family, plan.resolved) for name, plan in plans.items()} == {
        "text_encoder": ("CLIP text", "replicate"),
        "text_encoder_2": ("T5", "fold"),
        "image_encoder": ("CLIP vision", "replicate"),
    }


def test_the_class_in_the_model_index_counts_not_the_one_in_config_json() -> None:
    index = {"text_encoder": ["transformers", "CLIPTextModelWithProjection"]}
    plan = plan_pipeline(index, lambda name: {**CLIP_L, "architectures": ["CLIPModel"]})["text_encoder"]
    assert plan.num_parameters == read_facts(CLIP_L).num_parameters + 512 * 768


def test_qwen2_5_vl_in_a_pipeline_is_a_text_encoder_with_its_tower() -> None:
    index = {"text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"]}
    plan = plan_pipeline(index, lambda name: QWEN2_5_VL, "auto", 4, 8)["text_encoder"]
    assert (plan.family, plan.resolved, plan.hidden_size) == ("Qwen2.5-VL", "dp", 3584)
    assert plan.reasons == ("up to 8 prompts per call and hidden size 3584 >= 1024",)
    assert plan.num_parameters is not None
    assert plan.num_parameters > 676_550_144


def test_an_error_in_a_pipeline_names_the_component() -> None:
    broken = {**FLUX_CONFIGS, "text_encoder_2": {**T5_XXL, "d_model": "x"}}
    with pytest.raises(ConfigError, match=r"text_encoder_2/config\.json: d_model='x'"):
        plan_pipeline(FLUX, broken.__getitem__)
    unknown = {**FLUX_CONFIGS, "text_encoder_2": GPT2}
    with pytest.raises(UnknownFamilyError, match="text_encoder_2"):
        plan_pipeline(FLUX, unknown.__getitem__, "fold", 4)
    with pytest.raises(LayoutError, match=r"^tp_size=3 does not divide"):
        plan_pipeline(FLUX, FLUX_CONFIGS.__getitem__, "auto", 4, tp_size=3)


def test_the_planner_imports_no_torch() -> None:
    code = "import sys, enfold; enfold.plan_encoder({'model_type': 't5'}, 'fold', 2); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
