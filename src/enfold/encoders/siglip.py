"""SigLIP and SigLIP 2: a text tower, a vision tower with an attention pooling head, and the model that holds both.

The pooling head sees one row per image, so it stays whole; its MLP has the layers' names, hence `layers.*` below.
"""

from __future__ import annotations

from dataclasses import replace

from enfold.config import EncoderFacts, Weight
from enfold.encoders.clip import second_tower
from enfold.encoders.family import (
    Config,
    Family,
    Tower,
    TowerSizes,
    attention,
    dtype_of,
    embedding,
    flag,
    head_size,
    linear,
    linear_keys,
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
    "layers.*.mlp.fc1": "colwise",
    "layers.*.mlp.fc2": "rowwise",
}


def _tower(config: Config, kind: str) -> EncoderFacts:
    """Read what both towers of both versions share; the caller adds the weights outside the layers."""
    hidden, heads = size(config, "hidden_size", 768), size(config, "num_attention_heads", 12)
    width, layers = size(config, "intermediate_size", 3072), size(config, "num_hidden_layers", 12)
    head_dim = head_size(hidden, heads)
    version = "SigLIP2" if config["model_type"].startswith("siglip2") else "SigLIP"
    return EncoderFacts(
        family=f"{version} {kind}",
        model_type=config["model_type"],
        kind="text" if kind == "text" else "image",
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=width,
        num_layers=layers,
        vocab_size=0,
        dtype=dtype_of(config),
        weights=(
            *attention(hidden, heads, head_dim, layers, qkv_bias=True, out_bias=True),
            *mlp(hidden, width, layers, bias=True),
            *norm(hidden, 2 * layers + 1, bias=True),
        ),
    )


def text_facts(config: Config) -> EncoderFacts:
    """Read a siglip_text_model or siglip2_text_model config.json."""
    tower = _tower(config, "text")
    hidden, vocab = tower.hidden_size, size(config, "vocab_size", 32000)
    weights = (
        *embedding(vocab, hidden),
        *whole("position embedding", size(config, "max_position_embeddings", 64), hidden),
        *tower.weights,
        *linear("head", size(config, "projection_size", hidden), hidden, bias=True),
    )
    return replace(tower, vocab_size=vocab, weights=weights)


def vision_facts(config: Config) -> EncoderFacts:
    """Read a siglip_vision_model or siglip2_vision_model config.json."""
    tower = _tower(config, "vision")
    hidden, channels = tower.hidden_size, size(config, "num_channels", 3)
    image, patch = pair(config, "image_size", 224), pair(config, "patch_size", 16)
    num_patches = (image[0] // patch[0]) * (image[1] // patch[1])
    if config["model_type"].startswith("siglip2"):
        num_patches = size(config, "num_patches", 256)
    weights = (
        *whole("patch embedding", hidden, channels * patch[0] * patch[1]),
        *whole("patch embedding bias", hidden),
        *whole("position embedding", num_patches, hidden),
        *tower.weights,
        *(_pooling_head(hidden, tower.intermediate_size) if flag(config, "vision_use_head", True) else ()),
    )
    return replace(tower, weights=weights)


def tower_sizes(config: Config) -> TowerSizes:
    """Read what the vision tower needs to run on blocks; every image has the same grid and nothing is merged."""
    image, patch = pair(config, "image_size", 224), pair(config, "patch_size", 16)
    hidden = size(config, "hidden_size", 768)
    grid = (image[0] // patch[0], image[1] // patch[1])
    return TowerSizes(
        hidden_size=hidden,
        num_heads=size(config, "num_attention_heads", 12),
        num_layers=size(config, "num_hidden_layers", 12),
        merge_size=1,
        patch_features=size(config, "num_channels", 3) * patch[0] * patch[1],
        out_features=hidden,
        linear_keys=linear_keys(hidden, size(config, "intermediate_size", 3072)),
        fixed_grid=grid,
    )


TOWER = Tower(
    tower_sizes,
    takes="images",
    patch_embed="embeddings.patch_embedding",
    pos_embed="embeddings.position_embedding",
    layers="encoder.layers",
    norm1="layer_norm1",
    attention="self_attn",
    norm2="layer_norm2",
    merger="",
    final_norm="post_layernorm",
    head="head",
    prefixes=("vision_model.",),
)


def _pooling_head(hidden: int, width: int) -> list[Weight]:
    return [
        *whole("probe", hidden),
        *linear("pooling query key value", 3 * hidden, hidden, bias=True),
        *linear("pooling output", hidden, hidden, bias=True),
        *norm(hidden, 1, bias=True),
        *linear("pooling up", width, hidden, bias=True),
        *linear("pooling down", hidden, width, bias=True),
    ]


def towers(config: Config) -> dict[str, Config]:
    """Return the configs of the text and the vision tower of a siglip or siglip2 config.json."""
    shared = {"dtype": dtype_of(config)}
    return {
        kind: {**shared, **section(config, f"{kind}_config"), "model_type": f"{config['model_type']}_{kind}_model"}
        for kind in ("text", "vision")
    }


def facts(config: Config) -> EncoderFacts:
    """Read a siglip or siglip2 config.json as one model (SiglipModel): the text tower's sizes, the weights of both."""
    parts = towers(config)
    text, vision = text_facts(parts["text"]), vision_facts(parts["vision"])
    return replace(
        text,
        family=text.family.removesuffix(" text"),
        model_type=config["model_type"],
        dtype=dtype_of(config),
        weights=(*text.weights, *second_tower(vision), *whole("logit scale and bias", 2)),
        notes=("both towers are in the inventory; the sizes shown are those of the text tower",),
    )


def _family(name: str, model_type: str) -> tuple[Family, Family, Family]:
    # SigLIP2 resizes its positions for each image by itself: it is not spread in blocks.
    tower = TOWER if model_type == "siglip" else None
    return (
        Family(f"{name} text", (f"{model_type}_text_model",), text_facts, TP_PLAN, output="out_proj"),
        Family(
            f"{name} vision", (f"{model_type}_vision_model",), vision_facts, TP_PLAN, output="out_proj", tower=tower
        ),
        Family(name, (model_type,), facts, TP_PLAN, output="out_proj"),
    )


SIGLIP_TEXT, SIGLIP_VISION, SIGLIP = _family("SigLIP", "siglip")
SIGLIP2_TEXT, SIGLIP2_VISION, SIGLIP2 = _family("SigLIP2", "siglip2")
FAMILIES = (SIGLIP_TEXT, SIGLIP_VISION, SIGLIP, SIGLIP2_TEXT, SIGLIP2_VISION, SIGLIP2)
