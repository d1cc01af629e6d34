"""BERT, RoBERTa and XLM-RoBERTa: bidirectional text encoders with a pooler."""

from __future__ import annotations

from enfold.config import EncoderFacts
from enfold.encoders.family import (
    Config,
    Family,
    attention,
    dtype_of,
    embedding,
    head_size,
    linear,
    mlp,
    norm,
    size,
    whole,
)

# `layer.*.output.dense`, because `output.dense` alone would also name the attention's.
TP_PLAN = {
    "attention.self.query": "colwise",
    "attention.self.key": "colwise",
    "attention.self.value": "colwise",
    "attention.output.dense": "rowwise",
    "intermediate.dense": "colwise",
    "layer.*.output.dense": "rowwise",
}

NAMES = {"bert": "BERT", "roberta": "RoBERTa", "xlm-roberta": "XLM-RoBERTa"}


def facts(config: Config) -> EncoderFacts:
    """Read a bert, roberta or xlm-roberta config.json (class BertModel or its like, with the pooler)."""
    model_type = config["model_type"]
    hidden, heads = size(config, "hidden_size", 768), size(config, "num_attention_heads", 12)
    width, layers = size(config, "intermediate_size", 3072), size(config, "num_hidden_layers", 12)
    vocab = size(config, "vocab_size", 50265 if model_type == "roberta" else 30522)
    head_dim = head_size(hidden, heads)
    return EncoderFacts(
        family=NAMES[model_type],
        model_type=model_type,
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
            *whole("position embedding", size(config, "max_position_embeddings", 512), hidden),
            *whole("token type embedding", size(config, "type_vocab_size", 2), hidden),
            *attention(hidden, heads, head_dim, layers, qkv_bias=True, out_bias=True),
            *mlp(hidden, width, layers, bias=True),
            *norm(hidden, 2 * layers + 1, bias=True),
            *linear("pooler", hidden, hidden, bias=True),
        ),
    )


def _family(model_type: str, encoder_class: str) -> Family:
    return Family(
        NAMES[model_type],
        (model_type,),
        facts,
        TP_PLAN,
        query="query",
        key="key",
        value="value",
        output="attention.output.dense",
        encoder_class=encoder_class,
    )


BERT = _family("bert", "BertModel")
ROBERTA = _family("roberta", "RobertaModel")
XLM_ROBERTA = _family("xlm-roberta", "XLMRobertaModel")
FAMILIES = (BERT, ROBERTA, XLM_ROBERTA)
