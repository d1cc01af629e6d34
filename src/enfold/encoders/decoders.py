"""Language models as text encoders: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, the text side of Qwen2.5-VL.

Transformers ships their tables (`base_model_tp_plan`), so what stands here is sizes: one row of class defaults each.
A config.json on the hub leaves out what equals the default. Composite models stand in composites.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from enfold.config import EncoderFacts, Weight
from enfold.encoders.family import (
    Config,
    Family,
    architecture,
    attention,
    dtype_of,
    embedding,
    flag,
    head_size,
    mlp,
    norm,
    size,
    whole,
)
from enfold.errors import ConfigError


@dataclass(frozen=True)
class Defaults:
    """What a configuration class of Transformers fills in; None: derived from the other sizes."""

    family: str
    vocab: int
    hidden: int
    width: int
    layers: int
    heads: int
    kv_heads: int | None
    head_dim: int | None = None
    qkv_bias: bool | None = None  # None: the config's attention_bias says so, for the output projection too
    mlp_bias_key: str = ""
    norms_per_layer: int = 2
    query_key_norm: bool = False
    tied: bool = False


DEFAULTS: Mapping[str, Defaults] = {
    "llama": Defaults("Llama", 32000, 4096, 11008, 32, 32, None, mlp_bias_key="mlp_bias"),
    "mistral": Defaults("Mistral", 32000, 4096, 14336, 32, 32, 8, qkv_bias=False),
    "qwen2": Defaults("Qwen2", 151936, 4096, 22016, 32, 32, 32, qkv_bias=True),
    "qwen3": Defaults("Qwen3", 151936, 4096, 22016, 32, 32, 32, 128, query_key_norm=True),
    "gemma2": Defaults("Gemma 2", 256000, 2304, 9216, 26, 8, 4, 256, norms_per_layer=4, tied=True),
    "gemma3_text": Defaults(
        "Gemma 3", 262208, 2304, 9216, 26, 8, 4, 256, norms_per_layer=4, query_key_norm=True, tied=True
    ),
    "qwen2_5_vl_text": Defaults("Qwen2.5-VL text", 152064, 8192, 29568, 80, 64, 8, qkv_bias=True),
}


def facts(config: Config) -> EncoderFacts:
    """Read a decoder's config.json; a ...ForCausalLM class has an lm_head more than the plain model."""
    model_type = config["model_type"]
    defaults = DEFAULTS[model_type]
    hidden, heads = size(config, "hidden_size", defaults.hidden), size(config, "num_attention_heads", defaults.heads)
    width = size(config, "intermediate_size", defaults.width)
    layers = size(config, "num_hidden_layers", defaults.layers)
    vocab, kv_heads = size(config, "vocab_size", defaults.vocab), _num_kv_heads(config, heads, defaults.kv_heads)
    head_dim = _head_dim(config, hidden, heads, defaults.head_dim)
    has_bias = flag(config, "attention_bias", False) if defaults.qkv_bias is None else defaults.qkv_bias
    mlp_bias = flag(config, defaults.mlp_bias_key, False) if defaults.mlp_bias_key else False
    out_bias = has_bias and defaults.qkv_bias is None
    has_head = architecture(config).endswith("ForCausalLM")
    return EncoderFacts(
        family=defaults.family,
        model_type=model_type,
        kind="text",
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=width,
        num_layers=layers,
        vocab_size=vocab,
        dtype=dtype_of(config),
        weights=(
            *embedding(vocab, hidden),
            *attention(hidden, heads, head_dim, layers, num_kv_heads=kv_heads, qkv_bias=has_bias, out_bias=out_bias),
            *mlp(hidden, width, layers, gated=True, bias=mlp_bias),
            *norm(hidden, defaults.norms_per_layer * layers + 1),
            *(whole("query and key norm", head_dim, count=2 * layers) if defaults.query_key_norm else ()),
            *(lm_head(vocab, hidden, flag(config, "tie_word_embeddings", defaults.tied)) if has_head else ()),
        ),
    )


def _num_kv_heads(config: Config, heads: int, default: int | None) -> int:
    """Return the key-value heads: a missing key means the class default, null means as many as query heads."""
    kv_heads = size({"num_key_value_heads": config.get("num_key_value_heads", default)}, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    return kv_heads


def _head_dim(config: Config, hidden: int, heads: int, default: int | None) -> int:
    if config.get("head_dim") is None and default is None:
        return head_size(hidden, heads)
    return size(config, "head_dim", default)


def lm_head(vocab: int, hidden: int, tied: bool) -> list[Weight]:
    """Return the head of a model that a pipeline holds whole: rows cut, and free where it is the embedding itself."""
    return [Weight("lm_head", (vocab, hidden), 1, "features", tied=tied)]


FAMILIES = tuple(Family(defaults.family, (model_type,), facts) for model_type, defaults in DEFAULTS.items())
