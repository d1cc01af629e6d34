"""CLIP: a text tower (causal), a vision tower, either with its projection, and the model that holds both."""

from __future__ import annotations

from dataclasses import replace

from enfold.config import EncoderFacts, Weight
from enfold.encoders.family import (
    Config,
    Family,
    architecture,
    attention,
    dtype_of,
    embedding,
    head_size,
    mlp,
    norm,
    pair,
    section,
    size,
    whole,
)

TP_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
}


def text_facts(config: Config) -> EncoderFacts:
    """Read a clip_text_model config.json; the class CLIPTextModelWithProjection has one weight more."""
    hidden, heads = size(config, "hidden_size", 512), size(config, "num_attention_heads", 8)
    width, layers = size(config, "intermediate_size", 2048), size(config, "num_hidden_layers", 12)
    vocab, positions = size(config, "vocab_size", 49408), size(config, "max_position_embeddings", 77)
    return EncoderFacts(
        family="CLIP text",
        model_type="clip_text_model",
        kind="text",
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_size(hidden, heads),
        intermediate_size=width,
        num_layers=layers,
        vocab_size=vocab,
        dtype=dtype_of(config),
        weights=(
            *embedding(vocab, hidden),
            *whole("position embedding", positions, hidden),
            *_layers(hidden, heads, width, layers),
            *norm(hidden, 1, bias=True),
            *_projection(config, hidden),
        ),
    )


def vision_facts(config: Config) -> EncoderFacts:
    """Read a clip_vision_model config.json; the class CLIPVisionModelWithProjection has one weight more."""
    hidden, heads = size(config, "hidden_size", 768), size(config, "num_attention_heads", 12)
    width, layers = size(config, "intermediate_size", 3072), size(config, "num_hidden_layers", 12)
    image, patch = pair(config, "image_size", 224), pair(config, "patch_size", 32)
    channels = size(config, "num_channels", 3)
    num_patches = (image[0] // patch[0]) * (image[1] // patch[1])
    return EncoderFacts(
        family="CLIP vision",
        model_type="clip_vision_model",
        kind="image",
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_size(hidden, heads),
        intermediate_size=width,
        num_layers=layers,
        vocab_size=0,
        dtype=dtype_of(config),
        weights=(
            *whole("class embedding", hidden),
            *whole("patch embedding", hidden, channels, *patch),
            *whole("position embedding", num_patches + 1, hidden),
            *_layers(hidden, heads, width, layers),
            *norm(hidden, 2, bias=True),
            *_projection(config, hidden),
        ),
    )


def _layers(hidden: int, heads: int, width: int, layers: int) -> list[Weight]:
    return [
        *attention(hidden, heads, hidden // heads, layers, qkv_bias=True, out_bias=True),
        *mlp(hidden, width, layers, bias=True),
        *norm(hidden, 2 * layers, bias=True),
    ]


def _projection(config: Config, hidden: int) -> list[Weight]:
    if not architecture(config).endswith("WithProjection"):
        return []
    return whole("projection", size(config, "projection_dim", 512), hidden)


def towers(config: Config) -> dict[str, Config]:
    """Return the configs of the text and the vision tower of a clip config.json.

    Old files carry a second copy, `text_config_dict`, that wins over `text_config` (Transformers reads it so too).
    """
    text = section(config, "text_config_dict") or section(config, "text_config")
    vision = section(config, "vision_config_dict") or section(config, "vision_config")
    shared = {"dtype": dtype_of(config)}
    return {
        "text": {**shared, **text, "model_type": "clip_text_model"},
        "vision": {**shared, **vision, "model_type": "clip_vision_model"},
    }


def facts(config: Config) -> EncoderFacts:
    """Read a clip config.json as one model (CLIPModel): the text tower's sizes, the weights of both."""
    parts = towers(config)
    text, vision = text_facts(parts["text"]), vision_facts(parts["vision"])
    projection = size(config, "projection_dim", 512)
    return replace(
        text,
        family="CLIP",
        model_type="clip",
        dtype=dtype_of(config),
        weights=(
            *text.weights,
            *second_tower(vision),
            *whole("text projection", projection, text.hidden_size),
            *whole("visual projection", projection, vision.hidden_size),
            *whole("logit scale", 1),
        ),
        notes=("both towers are in the inventory; the sizes shown are those of the text tower",),
    )


def second_tower(facts: EncoderFacts) -> list[Weight]:
    """Return the weights of a tower that stands beside the encoder; they keep their own heads."""
    heads = (facts.num_heads, facts.num_kv_heads)
    return [replace(weight, name=f"{facts.kind} tower's {weight.name}", heads=heads) for weight in facts.weights]


CLIP_TEXT = Family("CLIP text", ("clip_text_model",), text_facts, TP_PLAN, output="out_proj")
CLIP_VISION = Family("CLIP vision", ("clip_vision_model",), vision_facts, TP_PLAN, output="out_proj")
CLIP = Family("CLIP", ("clip",), facts, TP_PLAN, output="out_proj")
FAMILIES = (CLIP_TEXT, CLIP_VISION, CLIP)
