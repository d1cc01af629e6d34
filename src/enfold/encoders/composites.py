"""Vision-language models whose text side is a pipeline's encoder: Qwen2.5-VL, Mistral 3, Gemma 3.

The vision tower and the projector are part of what is loaded, so they are in the inventory; Gemma 3's tower is a
SigLIP and folds by SigLIP's table, the other two stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from enfold.config import EncoderFacts, Weight
from enfold.encoders import decoders, qwen_vl, siglip
from enfold.encoders.clip import second_tower
from enfold.encoders.family import (
    Config,
    Family,
    architecture,
    dtype_of,
    flag,
    linear,
    norm,
    pair,
    section,
    size,
    whole,
)
from enfold.errors import UnknownFamilyError

# What Mistral3Config fills in where a whole section is missing; a section that is there falls back on its own class.
MISTRAL3_TEXT = {
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
}
PIXTRAL = {"patch_size": 14}


def qwen2_5_vl(config: Config) -> EncoderFacts:
    """Read a qwen2_5_vl config.json; files from before Transformers v5 keep the text side's keys at the top."""
    text_config = config if config.get("text_config") is None else section(config, "text_config")
    text = _text(config, text_config, "qwen2_5_vl_text")
    tied = flag(config, "tie_word_embeddings", False) or flag(text_config, "tie_word_embeddings", False)
    vision = qwen_vl.qwen2_5_facts({**section(config, "vision_config"), "model_type": "qwen2_5_vl_vision"})
    weights = [replace(weight, split="whole", fast_split=None) for weight in vision.weights]
    note = "the vision tower (visual) stays whole on every rank"
    return _join(config, text, "Qwen2.5-VL", weights, tied=tied, note=note)


def mistral3(config: Config) -> EncoderFacts:
    """Read a mistral3 config.json: a Mistral with a Pixtral tower."""
    text = _text(config, section(config, "text_config") or MISTRAL3_TEXT, "mistral")
    vision = section(config, "vision_config") or PIXTRAL
    _check_type(vision, "pixtral")
    layers = config.get("vision_feature_layer", -1)
    num_features = len(layers) if isinstance(layers, list | tuple) else 1
    hidden, bias = size(vision, "hidden_size", 1024), flag(config, "multimodal_projector_bias", False)
    merged = hidden * size(config, "spatial_merge_size", 2) ** 2
    weights = [
        *_pixtral(vision),
        *norm(hidden, 1),
        *whole("patch merger", hidden, merged),
        *linear("projector in", text.hidden_size, hidden * num_features, bias=bias),
        *linear("projector out", text.hidden_size, text.hidden_size, bias=bias),
    ]
    tied = flag(config, "tie_word_embeddings", True)
    note = "the vision tower (Pixtral) and the projector stay whole on every rank"
    return _join(config, text, "Mistral 3", weights, tied=tied, note=note)


def gemma3(config: Config) -> EncoderFacts:
    """Read a gemma3 config.json: a Gemma 3 with a SigLIP tower."""
    text = _text(config, section(config, "text_config"), "gemma3_text")
    vision_config = section(config, "vision_config")
    _check_type(vision_config, "siglip_vision_model")
    vision = siglip.vision_facts({**vision_config, "model_type": "siglip_vision_model"})
    weights = [
        *second_tower(vision),
        *whole("projector", vision.hidden_size, text.hidden_size),
        *norm(vision.hidden_size, 1),
    ]
    tied = flag(config, "tie_word_embeddings", True)
    note = "the vision tower (SigLIP) folds too, by its own heads; the projector stays whole on every rank"
    return _join(config, text, "Gemma 3 VL", weights, tied=tied, note=note)


def _text(config: Config, text_config: Config, model_type: str) -> EncoderFacts:
    """Read the text side; the precision is the whole model's where the section names none."""
    if text_config is not config:
        _check_type(text_config, model_type)
    sizes = {key: value for key, value in text_config.items() if key != "architectures"}
    facts = decoders.facts({**sizes, "model_type": model_type})
    named = config.get("dtype") or config.get("torch_dtype")
    return replace(facts, dtype=dtype_of(config)) if named else facts


def _check_type(part: Config, expected: str) -> None:
    if part.get("model_type", expected) != expected:
        raise UnknownFamilyError(
            f"a part with model_type={part['model_type']!r} is not supported here, only {expected!r}; "
            "replicate and dp still work"
        )


def _join(
    config: Config, text: EncoderFacts, family: str, vision: Sequence[Weight], *, tied: bool, note: str
) -> EncoderFacts:
    has_head = architecture(config).endswith("ForConditionalGeneration")
    head = decoders.lm_head(text.vocab_size, text.hidden_size, tied) if has_head else ()
    return replace(
        text,
        family=family,
        model_type=config["model_type"],
        weights=(*text.weights, *vision, *head),
        notes=(note,),
    )


def _pixtral(config: Config) -> list[Weight]:
    hidden, width = size(config, "hidden_size", 1024), size(config, "intermediate_size", 4096)
    layers, patch = size(config, "num_hidden_layers", 24), pair(config, "patch_size", 16)
    return [
        *whole("vision patch embedding", hidden, size(config, "num_channels", 3), *patch),
        *linear("vision attention", hidden, hidden, 4 * layers),
        *linear("vision up", width, hidden, 2 * layers),
        *linear("vision down", hidden, width, layers),
        *norm(hidden, 2 * layers + 1),
    ]


QWEN2_5_VL = Family("Qwen2.5-VL", ("qwen2_5_vl",), qwen2_5_vl)
MISTRAL3 = Family("Mistral 3", ("mistral3",), mistral3)
GEMMA3 = Family("Gemma 3 VL", ("gemma3",), gemma3)
FAMILIES = (QWEN2_5_VL, MISTRAL3, GEMMA3)
