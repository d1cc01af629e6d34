"""The vision towers of Qwen2-VL, 2.5-VL, 3-VL and 3.5: patches of images of any size, merged 2 x 2 at the end.

Qwen2.5-VL attends inside windows in most layers; its merge groups are permuted so that a window's rows stand together.
Qwen3-VL adds learned positions, resampled to each image's grid, and deepstack: mergers that read after some layers.
Qwen3.5 is that without deepstack.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isqrt

from enfold.config import EncoderFacts, Weight
from enfold.encoders.family import (
    Config,
    Family,
    Tower,
    TowerSizes,
    dtype_of,
    head_size,
    linear,
    linear_keys,
    norm,
    pair,
    row_parallel,
    section,
    size,
    whole,
)
from enfold.errors import ConfigError

ROPE_THETA = 10000.0

ATTENTION_PLAN = {"attn.qkv": "packed_colwise", "attn.proj": "rowwise"}
MERGER_PLAN = {"merger.mlp.0": "colwise", "merger.mlp.2": "rowwise"}

QWEN2_PLAN = {**ATTENTION_PLAN, "mlp.fc1": "colwise", "mlp.fc2": "rowwise", **MERGER_PLAN}
QWEN2_5_PLAN = {
    **ATTENTION_PLAN,
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
    **MERGER_PLAN,
}
QWEN3_PLAN = {**ATTENTION_PLAN, "linear_fc1": "colwise", "linear_fc2": "rowwise"}


def _layers(config: Config, key: str, default: Sequence[int]) -> tuple[int, ...]:
    """Return config[key], numbers of layers."""
    value = config.get(key)
    value = list(default) if value is None else value
    if not isinstance(value, list | tuple) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        raise ConfigError(f"{key}={value!r} can't be used; it must be a list of layer numbers")
    if len(set(value)) < len(value) or any(number < 0 for number in value):
        raise ConfigError(f"{key}={value!r} can't be used; layers are named once, from 0 on")
    return tuple(value)


def _patch_size(config: Config, default: int) -> int:
    height, width = pair(config, "patch_size", default)
    if height != width:
        raise ConfigError(f"patch_size={config.get('patch_size')!r} can't be used; patches are square")
    return height


def _patch_features(config: Config, patch_size: int) -> int:
    return size(config, "in_channels", 3) * size(config, "temporal_patch_size", 2) * patch_size**2


def _theta(config: Config) -> float:
    value = section(config, "rope_parameters").get("rope_theta")
    value = config.get("rope_theta", ROPE_THETA) if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"rope_theta={value!r} can't be used; it must be a number above 0")
    return float(value)


def _has_deepstack(config: Config) -> bool:
    return not str(config.get("model_type")).startswith("qwen3_5")


def qwen2_sizes(config: Config) -> TowerSizes:
    """Read a qwen2_vl_vision config.json, whose hidden_size is the width after merging."""
    hidden, patch = size(config, "embed_dim", 1280), _patch_size(config, 14)
    return TowerSizes(
        hidden_size=hidden,
        num_heads=size(config, "num_heads", 16),
        num_layers=size(config, "depth", 32),
        merge_size=size(config, "spatial_merge_size", 2),
        patch_features=_patch_features(config, patch),
        out_features=size(config, "hidden_size", 3584),
        linear_keys=linear_keys(hidden, hidden * size(config, "mlp_ratio", 4)),
        rope_theta=_theta(config),
        patch_size=patch,
    )


def qwen2_5_sizes(config: Config) -> TowerSizes:
    """Read a qwen2_5_vl_vision config.json."""
    hidden, depth = size(config, "hidden_size", 3584), size(config, "depth", 32)
    merge, patch = size(config, "spatial_merge_size", 2), _patch_size(config, 14)
    side = size(config, "window_size", 112) // merge // patch
    if side < 1:
        raise ConfigError(f"window_size={config.get('window_size')} is smaller than {merge} patches of {patch} pixels")
    return TowerSizes(
        hidden_size=hidden,
        num_heads=size(config, "num_heads", 16),
        num_layers=depth,
        merge_size=merge,
        patch_features=_patch_features(config, patch),
        out_features=size(config, "out_hidden_size", 3584),
        linear_keys=linear_keys(hidden, size(config, "intermediate_size", 3420), gated=True),
        rope_theta=_theta(config),
        window_side=side,
        full_layers=tuple(n for n in _layers(config, "fullatt_block_indexes", (7, 15, 23, 31)) if n < depth),
        patch_size=patch,
    )


def qwen3_sizes(config: Config) -> TowerSizes:
    """Read a qwen3_vl_vision config.json, or that of one of its siblings."""
    hidden, patch = size(config, "hidden_size", 1152), _patch_size(config, 16)
    positions = size(config, "num_position_embeddings", 2304)
    if isqrt(positions) ** 2 != positions:
        raise ConfigError(f"num_position_embeddings={positions} is no square; the positions are a square grid")
    return TowerSizes(
        hidden_size=hidden,
        num_heads=size(config, "num_heads", 16),
        num_layers=size(config, "depth", 27),
        merge_size=size(config, "spatial_merge_size", 2),
        patch_features=_patch_features(config, patch),
        out_features=size(config, "out_hidden_size", 3584),
        linear_keys=linear_keys(hidden, size(config, "intermediate_size", 4304)),
        tap_layers=_layers(config, "deepstack_visual_indexes", (8, 16, 24)) if _has_deepstack(config) else (),
        position_side=isqrt(positions),
        rope_theta=_theta(config),
        patch_size=patch,
    )


def _facts(
    family: str, config: Config, sizes: TowerSizes, mlp: list[Weight], outside: Sequence[Weight], *, norm_bias: bool
) -> EncoderFacts:
    """Return the facts of a tower from the weights of its MLPs and of what stands outside the layers."""
    hidden, layers = sizes.hidden_size, sizes.num_layers
    head_dim = head_size(hidden, sizes.num_heads)
    return EncoderFacts(
        family=family,
        model_type=config["model_type"],
        kind="image",
        hidden_size=hidden,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=head_dim,
        intermediate_size=mlp[0].shape[0],
        num_layers=layers,
        vocab_size=0,
        dtype=dtype_of(config),
        weights=(
            *whole("patch embedding", hidden, sizes.patch_features),
            Weight("query key value", (3 * hidden, hidden), layers, "heads", num_fused=3),
            Weight("query key value bias", (3 * hidden,), layers, "heads", num_fused=3),
            *row_parallel("attention output", hidden, hidden, layers, "head_columns", bias=True),
            *mlp,
            *norm(hidden, 2 * layers + 1, bias=norm_bias),
            *_merger(sizes, "merger", 1),
            *outside,
        ),
    )


def _merger(sizes: TowerSizes, name: str, count: int) -> list[Weight]:
    merged = sizes.hidden_size * sizes.merge_size**2
    return [
        *linear(f"{name} in", merged, merged, count, "features", bias=True),
        *row_parallel(f"{name} out", sizes.out_features, merged, count, "columns", bias=True),
    ]


def _mlp(hidden: int, width: int, layers: int, num_up: int) -> list[Weight]:
    return [
        *linear("MLP up", width, hidden, num_up * layers, "features", bias=True),
        *row_parallel("MLP down", hidden, width, layers, "columns", bias=True),
    ]


def qwen2_facts(config: Config) -> EncoderFacts:
    """Read a qwen2_vl_vision config.json."""
    sizes = qwen2_sizes(config)
    mlp = _mlp(sizes.hidden_size, sizes.hidden_size * size(config, "mlp_ratio", 4), sizes.num_layers, 1)
    return _facts("Qwen2-VL vision", config, sizes, mlp, (), norm_bias=True)


def qwen2_5_facts(config: Config) -> EncoderFacts:
    """Read a qwen2_5_vl_vision config.json; its MLPs are gated, its norms have no shift."""
    sizes = qwen2_5_sizes(config)
    mlp = _mlp(sizes.hidden_size, size(config, "intermediate_size", 3420), sizes.num_layers, 2)
    return _facts("Qwen2.5-VL vision", config, sizes, mlp, (), norm_bias=False)


def qwen3_facts(config: Config) -> EncoderFacts:
    """Read a qwen3_vl_vision, qwen3_vl_moe_vision, qwen3_5_vision or qwen3_5_moe_vision config.json."""
    sizes = qwen3_sizes(config)
    hidden, num_taps = sizes.hidden_size, len(sizes.tap_layers)
    outside = [
        *whole("patch embedding bias", hidden),
        *whole("position embedding", sizes.position_side**2, hidden),
        *(norm(hidden * sizes.merge_size**2, num_taps, bias=True) if num_taps else ()),
        *(_merger(sizes, "deepstack merger", num_taps) if num_taps else ()),
    ]
    mlp = _mlp(hidden, size(config, "intermediate_size", 4304), sizes.num_layers, 1)
    name = "Qwen3-VL vision" if _has_deepstack(config) else "Qwen3.5 vision"
    return _facts(name, config, sizes, mlp, outside, norm_bias=True)


_family = partial(Family, output="proj", fused_qkv="qkv", num_fused={"qkv": 3})

QWEN2_VL = _family(
    "Qwen2-VL vision",
    ("qwen2_vl_vision",),
    qwen2_facts,
    QWEN2_PLAN,
    tower=Tower(qwen2_sizes),
    encoder_class="Qwen2VisionTransformerPretrainedModel",
)
QWEN2_5_VL = _family(
    "Qwen2.5-VL vision", ("qwen2_5_vl_vision",), qwen2_5_facts, QWEN2_5_PLAN, tower=Tower(qwen2_5_sizes)
)
QWEN3_VL = _family(
    "Qwen3-VL vision",
    ("qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision"),
    qwen3_facts,
    QWEN3_PLAN,
    tower=Tower(qwen3_sizes, pos_embed="pos_embed", deepstack="deepstack_merger_list"),
)
FAMILIES = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL)


# The models that hold these towers.

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""model_types of vision-language models; the tower of each is f"{model_type}_vision"."""

TEXT_ENCODERS = ("qwen2_5_vl",)
"""Those whose whole model is the text encoder of diffusion pipelines, too (composites.py)."""


def towers(config: Config) -> dict[str, Config]:
    """Return the encoders of a vision-language model's config.json: "vision", and "text" where it is used as one.

    Old files name the tower's section (or the tower alone) by the model_type of the whole model. A section without a
    precision has that of the model, or of its language model.
    """
    model_type = config["model_type"]
    if "depth" in config and "vision_config" not in config:
        return {"": {**config, "model_type": f"{model_type}_vision"}}
    vision = section(config, "vision_config")
    named = vision.get("model_type", model_type)
    named = f"{model_type}_vision" if named == model_type else named
    sources = (vision, section(config, "text_config"))
    dtypes = [source.get(key) for source in sources for key in ("dtype", "torch_dtype")]
    tower = {**vision, "model_type": named, "dtype": next(filter(None, dtypes), None)}
    return {"text": config, "vision": tower} if model_type in TEXT_ENCODERS else {"vision": tower}
