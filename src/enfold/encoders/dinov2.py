"""DINOv2: an image encoder with layer scale; the giant one has a SwiGLU MLP."""

from __future__ import annotations

from enfold.config import EncoderFacts
from enfold.encoders.family import (
    Config,
    Family,
    attention,
    dtype_of,
    flag,
    head_size,
    mlp,
    norm,
    pair,
    size,
    whole,
)
from enfold.errors import ConfigError

TP_PLAN = {
    "attention.q_proj": "colwise",
    "attention.k_proj": "colwise",
    "attention.v_proj": "colwise",
    "attention.o_proj": "rowwise",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


def facts(config: Config) -> EncoderFacts:
    """Read a dinov2 config.json (class Dinov2Model)."""
    hidden, heads = size(config, "hidden_size", 768), size(config, "num_attention_heads", 12)
    layers, channels = size(config, "num_hidden_layers", 12), size(config, "num_channels", 3)
    image, patch = pair(config, "image_size", 224), pair(config, "patch_size", 14)
    num_patches = (image[0] // patch[0]) * (image[1] // patch[1])
    gated = flag(config, "use_swiglu_ffn", False)
    head_dim, width = head_size(hidden, heads), _mlp_width(config, hidden, gated)
    return EncoderFacts(
        family="DINOv2",
        model_type="dinov2",
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
            *(whole("mask token", hidden) if flag(config, "use_mask_token", True) else ()),
            *whole("patch embedding", hidden, channels, *patch),
            *whole("patch embedding bias", hidden),
            *whole("position embedding", num_patches + 1, hidden),
            *attention(hidden, heads, head_dim, layers, qkv_bias=flag(config, "qkv_bias", True), out_bias=True),
            *mlp(hidden, width, layers, gated=gated, bias=True),
            *whole("layer scale", hidden, count=2 * layers),
            *norm(hidden, 2 * layers + 1, bias=True),
        ),
    )


def _mlp_width(config: Config, hidden: int, gated: bool) -> int:
    ratio = config.get("mlp_ratio", 4)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < hidden * ratio < float("inf"):
        raise ConfigError(f"mlp_ratio={ratio!r} can't be used; it must be a number above 0")
    width = int(hidden * ratio)
    # SwiGLU has three matrices where the plain MLP has two: its width is two thirds, in steps of 8.
    return (int(width * 2 / 3) + 7) // 8 * 8 if gated else width


DINOV2 = Family("DINOv2", ("dinov2",), facts, TP_PLAN, encoder_class="Dinov2Model")
FAMILIES = (DINOV2,)
