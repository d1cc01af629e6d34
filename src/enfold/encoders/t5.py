"""T5, mT5 and UMT5: encoders with a relative position bias per head, in the first layer or (UMT5) in every layer."""

from __future__ import annotations

from enfold.config import EncoderFacts, Weight
from enfold.encoders.family import Config, Family, attention, dtype_of, embedding, mlp, norm, size

TP_PLAN = {
    "SelfAttention.q": "colwise",
    "SelfAttention.k": "colwise",
    "SelfAttention.v": "colwise",
    "SelfAttention.o": "rowwise",
    "SelfAttention.relative_attention_bias": "head_columns",
    "DenseReluDense.wi": "colwise",
    "DenseReluDense.wi_0": "colwise",
    "DenseReluDense.wi_1": "colwise",
    "DenseReluDense.wo": "rowwise",
}


def facts(config: Config) -> EncoderFacts:
    """Read the encoder half of a T5, mT5 or UMT5 config.json; the decoder is not part of an encoder."""
    is_t5 = config["model_type"] == "t5"
    hidden = size(config, "d_model", 512)
    heads = size(config, "num_heads", 8 if is_t5 else 6)
    head_dim = size(config, "d_kv", 64)
    width = size(config, "d_ff", 2048 if is_t5 else 1024)
    layers = size(config, "num_layers", 6 if is_t5 else 8)
    vocab = size(config, "vocab_size", 32128 if is_t5 else 250112)
    gated = str(config.get("feed_forward_proj", "relu" if is_t5 else "gated-gelu")).startswith("gated")
    num_biases = layers if config["model_type"] == "umt5" else 1
    buckets = size(config, "relative_attention_num_buckets", 32)
    return EncoderFacts(
        family={"t5": "T5", "mt5": "mT5", "umt5": "UMT5"}[config["model_type"]],
        model_type=config["model_type"],
        kind="text",
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=width,
        num_layers=layers,
        vocab_size=vocab,
        dtype=dtype_of(config),
        weights=(
            *embedding(vocab, hidden),
            *attention(hidden, heads, head_dim, layers),
            Weight("relative position bias", (buckets, heads), num_biases, "head_columns"),
            *mlp(hidden, width, layers, gated=gated),
            *norm(hidden, 2 * layers + 1),
        ),
    )


T5 = Family("T5", ("t5",), facts, TP_PLAN, query="q", key="k", value="v", output="o", encoder_class="T5EncoderModel")
MT5 = Family(
    "mT5", ("mt5",), facts, TP_PLAN, query="q", key="k", value="v", output="o", encoder_class="MT5EncoderModel"
)
UMT5 = Family(
    "UMT5", ("umt5",), facts, TP_PLAN, query="q", key="k", value="v", output="o", encoder_class="UMT5EncoderModel"
)
FAMILIES = (T5, MT5, UMT5)
