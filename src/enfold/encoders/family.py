"""The form of a family's table, and the blocks that inventories are written with.

A family file says three things about its models and nothing else: how its sizes are read from config.json (`facts`),
which weights it has, and how its modules are sharded (`tp_plan`, in Hugging Face's vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from enfold.config import DTYPE_BYTES, EncoderFacts, Split, Weight
from enfold.errors import ConfigError

Config = Mapping[str, Any]
"""A config.json as a mapping; keys that equal the class default may be missing."""


@dataclass(frozen=True)
class TowerSizes:
    """What the forward of one vision tower needs of its config.json.

    merge_size: patches per side of a merge group; 1 where nothing is merged. patch_features: values of one patch.
    out_features: width of the merged rows. tap_layers: layers after which a deepstack merger reads, merger by merger.
    position_side: side of the learned grid of positions, 0 without. rope_theta: 0 without rotary positions.
    window_side: side of an attention window in merge groups, 0 without; full_layers attend to whole frames.
    linear_keys: how many keys of attention cost as much as the linear layers, per patch (see `linear_keys`).
    fixed_grid: rows and columns of every image where the tower takes one size only.
    patch_size: pixels per side of a patch; 0 where the family's file does not say.
    """

    hidden_size: int
    num_heads: int
    num_layers: int
    merge_size: int
    patch_features: int
    out_features: int
    linear_keys: float
    tap_layers: tuple[int, ...] = ()
    position_side: int = 0
    rope_theta: float = 0.0
    window_side: int = 0
    full_layers: tuple[int, ...] = ()
    fixed_grid: tuple[int, int] | None = None
    patch_size: int = 0

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_heads

    def frame_cost(self, height: int, width: int) -> float:
        """Return the cost of one frame of p patches, p * (keys that a patch attends to + linear_keys).

        linear_keys is what the linear layers cost per patch, in keys. The published form is p * (p + alpha).
        """
        num_tokens = height * width
        window = (self.window_side * self.merge_size) ** 2
        full = len(self.full_layers) / self.num_layers if window else 1.0
        keys = full * num_tokens + (1 - full) * min(num_tokens, window)
        return num_tokens * (keys + self.linear_keys)


@dataclass(frozen=True)
class Tower:
    """Where the parts of a vision tower are in its Transformers module, by name; "" for what it does not have.

    read: from config.json to its sizes. takes: "patches" (flat patches and grid_thw) or "images" of one size.
    Every layer is x + attention(norm1(x)), then x + mlp(norm2(x)).
    prefixes: how the tower's names begin in the checkpoint of a whole model.
    """

    read: Callable[[Config], TowerSizes]
    takes: str = "patches"
    patch_embed: str = "patch_embed.proj"
    pos_embed: str = ""
    layers: str = "blocks"
    norm1: str = "norm1"
    attention: str = "attn"
    norm2: str = "norm2"
    merger: str = "merger"
    deepstack: str = ""
    final_norm: str = ""
    head: str = ""
    prefixes: tuple[str, ...] = ("model.visual.", "visual.")


@dataclass(frozen=True)
class Family:
    """How the models of one or more `model_type`s are read and sharded.

    tp_plan: module name (a suffix, `*` for a number) -> style. None: Transformers ships the table with the config
        (`base_model_tp_plan`). Styles: `colwise` (rows of the weight; the output stays split), `rowwise` (the input
        is split), `packed_colwise` (colwise for the `num_fused` projections stacked in one weight),
        `colwise_gather_output`, `head_columns` (a table with one column per head, such as a relative position bias).
    query, key, value, output: names (suffixes) of the attention's projections; what else stands under `colwise` is
        cut at multiples of 64. A fused projection is named in `fused_qkv`.
    num_fused: how many projections are stacked in a `packed_colwise` weight, by the last part of its module name.
    encoder_class: the Transformers class that is the encoder where a checkpoint names another one
        (T5ForConditionalGeneration -> T5EncoderModel); "" keeps what the checkpoint names.
    tower: how it runs as a vision tower (enfold.vision), None for other encoders. Inside another model (as the `visual`
        of a text encoder) a tower that packs patches is spread by itself or stays whole.
    """

    name: str
    model_types: tuple[str, ...]
    facts: Callable[[Config], EncoderFacts]
    tp_plan: Mapping[str, str] | None = None
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    fused_qkv: str = ""
    num_fused: Mapping[str, int] | None = None
    encoder_class: str = ""
    tower: Tower | None = None


def size(config: Config, key: str, default: int | None = None) -> int:
    """Return config[key], a whole number of at least 1; `default` where the key is missing or null."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}={value!r} can't be used; it must be a whole number of at least 1")
    return value


def flag(config: Config, key: str, default: bool) -> bool:
    """Return config[key], true or false; `default` where the key is missing or null."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} can't be used; it must be true or false")
    return value


def pair(config: Config, key: str, default: int) -> tuple[int, int]:
    """Return config[key] as (height, width): one number stands for both."""
    value = config.get(key)
    if isinstance(value, list | tuple):
        if len(value) != 2:
            raise ConfigError(f"{key}={value!r} can't be used; it must be one number or two")
        return size({key: value[0]}, key), size({key: value[1]}, key)
    both = size(config, key, default)
    return both, both


def section(config: Config, key: str) -> Config:
    """Return the nested config under `key`; empty where it is missing or null."""
    value = config.get(key)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value!r} can't be used; it must be an object")
    return value


def head_size(hidden_size: int, num_heads: int) -> int:
    """Return the features of one head where a config does not name them; raise ConfigError if heads do not divide."""
    if hidden_size % num_heads:
        raise ConfigError(f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}")
    return hidden_size // num_heads


def linear_keys(hidden_size: int, intermediate_size: int, *, gated: bool = False) -> float:
    """Return how many keys of attention cost a token as much as a layer's projections.

    4 h^2 + k h i multiply-adds (k = 3 matrices in a gated MLP, else 2) over 2 h for each key.
    """
    return 2 * hidden_size + (3 if gated else 2) * intermediate_size / 2


def dtype_of(config: Config) -> str:
    """Return the precision that config.json names, under its new or old key; float32 where it names none."""
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype={name!r} is not supported; use one of {', '.join(DTYPE_BYTES)}")
    return name


def architecture(config: Config) -> str:
    """Return the class that the checkpoint names, or an empty string."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list | tuple) and names else ""


def attention(
    hidden_size: int,
    num_heads: int,
    head_dim: int,
    num_layers: int,
    *,
    num_kv_heads: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
) -> list[Weight]:
    """Return the weights of separate q, k, v and output projections in every layer."""
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    weights = [
        *linear("query", num_heads * head_dim, hidden_size, num_layers, "heads", bias=qkv_bias),
        *linear("key", kv_heads * head_dim, hidden_size, num_layers, "kv_heads", bias=qkv_bias),
        *linear("value", kv_heads * head_dim, hidden_size, num_layers, "kv_heads", bias=qkv_bias),
        *row_parallel("output", hidden_size, num_heads * head_dim, num_layers, "head_columns", bias=out_bias),
    ]
    return weights


def mlp(
    hidden_size: int, intermediate_size: int, num_layers: int, *, gated: bool = False, bias: bool = False
) -> list[Weight]:
    """Return the weights of an MLP in every layer: one up projection, or two where it is `gated`."""
    num_up = (2 if gated else 1) * num_layers
    return [
        *linear("up", intermediate_size, hidden_size, num_up, "features", bias=bias),
        *row_parallel("down", hidden_size, intermediate_size, num_layers, "columns", bias=bias),
    ]


def linear(
    name: str, out_features: int, in_features: int, count: int = 1, split: Split = "whole", *, bias: bool = False
) -> list[Weight]:
    """Return a linear layer's weight and, where it has one, its bias (cut like the rows of the weight)."""
    weights = [Weight(name, (out_features, in_features), count, split)]
    return [*weights, Weight(f"{name} bias", (out_features,), count, split)] if bias else weights


def row_parallel(
    name: str, out_features: int, in_features: int, count: int, fast_split: Split, *, bias: bool = False
) -> list[Weight]:
    """Return a linear layer whose input arrives split: exact cuts its rows, fast its columns as `fast_split` says."""
    weights = [Weight(name, (out_features, in_features), count, "features", fast_split=fast_split)]
    bias_weight = Weight(f"{name} bias", (out_features,), count, "features", fast_split="whole")
    return [*weights, bias_weight] if bias else weights


def norm(hidden_size: int, count: int, *, bias: bool = False) -> list[Weight]:
    """Return `count` norms: a scale, and a shift where they have a `bias`."""
    return [Weight("norm", (hidden_size,), count * (2 if bias else 1))]


def embedding(num_embeddings: int, hidden_size: int, name: str = "token embedding") -> list[Weight]:
    """Return a token embedding table, cut along its features so that any vocabulary size can be folded."""
    return [Weight(name, (num_embeddings, hidden_size), 1, "columns")]


def whole(name: str, *shape: int, count: int = 1) -> list[Weight]:
    """Return weights that every rank holds."""
    return [Weight(name, shape, count)]
