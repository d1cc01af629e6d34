"""A Flux pipeline with tiny random encoders and tokenizers that know single characters: nothing to download."""

from __future__ import annotations

import diffusers
import torch
import transformers as hf
from tokenizers import pre_tokenizers

HIDDEN = 1088  # 17 heads of 64


def tiny_flux() -> diffusers.FluxPipeline:
    torch.manual_seed(0)  # every rank makes the same weights
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2816, "num_attention_heads": 17, "num_hidden_layers": 2}
    clip = hf.CLIPTextConfig(vocab_size=640, projection_dim=HIDDEN, **sizes, **ids)
    t5 = hf.T5Config(
        d_model=HIDDEN, d_ff=2816, num_heads=17, d_kv=64, num_layers=2, vocab_size=128, feed_forward_proj="gated-gelu"
    )
    return diffusers.FluxPipeline(
        text_encoder=hf.CLIPTextModel(clip).eval(),
        text_encoder_2=hf.T5EncoderModel(t5).eval(),
        tokenizer=clip_tokenizer(),
        tokenizer_2=t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=None,
        vae=None,
    )


def clip_tokenizer() -> hf.CLIPTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    return hf.CLIPTokenizer(vocab={name: number for number, name in enumerate(names)}, merges=[], model_max_length=77)


def t5_tokenizer() -> hf.T5TokenizerFast:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    letters = [(chr(code), -3.0) for code in range(33, 127)]
    return hf.T5TokenizerFast(vocab=[*special, *letters], extra_ids=0, model_max_length=512)
