"""ViT: an image encoder with a class token and a tanh pooler."""

from __future__ import annotations

from enfold.config import EncoderFacts
from enfold.encoders.family import (
    Config,
    Family,
    attention,
    dtype_of,
    flag,
    head_size,
    linear,
    mlp,
    norm,
    pair,
    size,
    whole,
)

TP_PLAN = {
    "attention.q_proj": "colwise",
    "attention.k_proj": "colwise",
    "attention.v_proj": "colwise",
    "attention.o_proj": "rowwise",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
}


def facts(config: Config) -> EncoderFacts:
    """Read a vit config.json: the class ViTModel with its pooler, without a mask token."""
    hidden, heads = size(config, "hidden_size", 768), size(config, "num_attention_heads", 12)
    width, layers = size(config, "intermediate_size", 3072), size(config, "num_hidden_layers", 12)
    image, patch = pair(config, "image_size", 224), pair(config, "patch_size", 16)
    channels = size(config, "num_channels", 3)
    num_patches = (image[0] // patch[0]) * (image[1] // patch[1])
    head_dim = head_size(hidden, heads)
    return EncoderFacts(
        family="ViT",
        model_type="vit",
        kind="image",
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=width,
        num_layers=layers,
        vocab_size=0,
        dtype=dtype_of(config),
        weights=(
            *whole("class token", hidden),
            *whole("patch embedding", hidden, channels, *patch),
            *whole("patch embedding bias", hidden),
            *whole("position embedding", num_patches + 1, hidden),
            *attention(hidden, heads, head_dim, layers, qkv_bias=flag(config, "qkv_bias", True), out_bias=True),
            *mlp(hidden, width, layers, bias=True),
            *norm(hidden, 2 * layers + 1, bias=True),
            *linear("pooler", size(config, "pooler_output_size", hidden), hidden, bias=True),
        ),
    )


VIT = Family("ViT", ("vit",), facts, TP_PLAN, encoder_class="ViTModel")
FAMILIES = (VIT,)
