"""ModernBERT: rotary, mostly local attention; q, k, v lie in one weight, gate and up in another."""

from __future__ import annotations

from enfold.config import EncoderFacts, Split, Weight
from enfold.encoders.family import (
    Config,
    Family,
    dtype_of,
    embedding,
    flag,
    head_size,
    norm,
    row_parallel,
    size,
)

TP_PLAN = {
    "attn.Wqkv": "packed_colwise",
    "attn.Wo": "rowwise",
    "mlp.Wi": "packed_colwise",
    "mlp.Wo": "rowwise",
}

NUM_FUSED = {"Wqkv": 3, "Wi": 2}


def facts(config: Config) -> EncoderFacts:
    """Read a modernbert config.json (class ModernBertModel)."""
    hidden, heads = size(config, "hidden_size", 768), size(config, "num_attention_heads", 12)
    width, layers = size(config, "intermediate_size", 1152), size(config, "num_hidden_layers", 22)
    vocab = size(config, "vocab_size", 50368)
    out_bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    return EncoderFacts(
        family="ModernBERT",
        model_type="modernbert",
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
            *_fused("query key value", hidden, hidden, layers, "heads", bias=out_bias),
            *row_parallel("output", hidden, hidden, layers, "head_columns", bias=out_bias),
            *_fused("up", width, hidden, layers, "features", bias=mlp_bias),
            *row_parallel("down", hidden, width, layers, "columns", bias=mlp_bias),
            # The first layer has no norm before its attention: the embeddings have just been normalised.
            *norm(hidden, 2 * layers + 1, bias=flag(config, "norm_bias", False)),
        ),
    )


def _fused(name: str, rows: int, columns: int, layers: int, split: Split, *, bias: bool) -> list[Weight]:
    num_fused = NUM_FUSED["Wqkv" if split == "heads" else "Wi"]
    weights = [Weight(name, (num_fused * rows, columns), layers, split, num_fused)]
    return [*weights, Weight(f"{name} bias", (num_fused * rows,), layers, split, num_fused)] if bias else weights


MODERNBERT = Family(
    "ModernBERT",
    ("modernbert",),
    facts,
    TP_PLAN,
    output="attn.Wo",
    fused_qkv="Wqkv",
    num_fused=NUM_FUSED,
    encoder_class="ModernBertModel",
)
FAMILIES = (MODERNBERT,)
