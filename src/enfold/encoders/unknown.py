"""An encoder without a table: replicate and dp need none, so its sizes are read as far as usual names give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enfold.config import EncoderFacts


def unknown_facts(model_type: str, config: Mapping[str, Any]) -> EncoderFacts:
    """Read what the config of an unknown family says under the usual names; 0 where it says nothing."""
    nested = config.get("text_config")
    sources = (config, nested) if isinstance(nested, Mapping) else (config,)

    def read(*keys: str) -> int:
        values = (source.get(key) for source in sources for key in keys)
        return next((value for value in values if type(value) is int and value > 0), 0)

    heads = read("num_attention_heads", "num_heads", "n_head")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return EncoderFacts(
        family=f"unknown ({model_type})",
        model_type=model_type,
        kind="text",
        hidden_size=read("hidden_size", "d_model", "n_embd"),
        num_heads=heads,
        num_kv_heads=read("num_key_value_heads") or heads,
        head_dim=read("head_dim", "d_kv"),
        intermediate_size=read("intermediate_size", "d_ff"),
        num_layers=read("num_hidden_layers", "num_layers", "n_layer"),
        vocab_size=read("vocab_size"),
        dtype=dtype,
    )
