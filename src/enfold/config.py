"""What enfold knows of an encoder before it is loaded: sizes from config.json and an inventory of its weights.

Pure: no torch, no transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from enfold.errors import ConfigError

Mode = Literal["auto", "fold", "dp", "replicate"]
"""The user's word for how an encoder is spread; it resolves to a Layout."""

Numerics = Literal["exact", "fast"]
"""`exact`: collectives only move bytes. `fast`: row-parallel layers sum with all-reduce."""

Split = Literal["heads", "kv_heads", "features", "columns", "head_columns", "whole"]
"""How one weight is spread over a tp group.

heads, kv_heads: rows, cut at query or key-value heads.  features: rows, cut at multiples of 64.
columns: cut along the columns at multiples of 64.  head_columns: cut along the columns at query heads.
whole: every rank holds it.
"""

SEED_LIMIT = 2**63
"""Seeds of random generators are below it."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class Weight:
    """One kind of parameter: `count` tensors of `shape`, spread over a tp group as `split` says.

    `num_fused` projections lie one after another in the rows (a fused qkv has 3): each is cut by itself.
    `fast_split` replaces `split` where the numerics are fast (a row-parallel layer is cut along its input columns).
    `heads` are the (query, key-value) heads of a second tower, where they are not those of the encoder.
    A `tied` weight is the token embedding once more: it costs nothing where both are whole.
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    split: Split = "whole"
    num_fused: int = 1
    fast_split: Split | None = None
    heads: tuple[int, int] | None = None
    tied: bool = False

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all `count` tensors together."""
        return math.prod(self.shape) * self.count


@dataclass(frozen=True)
class EncoderFacts:
    """The sizes of one encoder, read from its config.json, and the inventory of all its weights."""

    family: str
    model_type: str
    kind: Literal["text", "image"]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    dtype: str = "float32"
    weights: tuple[Weight, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole encoder; tied weights count once."""
        return sum(weight.num_parameters for weight in self.weights if not weight.tied)


def check_mode(mode: object) -> Mode:
    """Return `mode` if it is one of the four words; raise ConfigError that lists them else."""
    if mode not in get_args(Mode):
        raise ConfigError(f"mode={mode!r} is not known; use one of {', '.join(get_args(Mode))}")
    return mode  # type: ignore[return-value]


def check_numerics(numerics: object) -> Numerics:
    """Return `numerics` if it is known; raise ConfigError that lists the choices else."""
    if numerics not in get_args(Numerics):
        raise ConfigError(f"numerics={numerics!r} is not known; use one of {', '.join(get_args(Numerics))}")
    return numerics  # type: ignore[return-value]
