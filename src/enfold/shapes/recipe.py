"""The parts of the shipped pipeline before training: a small Flux with its own tokenizer, T5, CLIP and autoencoder.

Sizes are chosen for training on two CPU cores: the autoencoder makes 8 x 8 latents of 8 channels, Flux packs them into
16 tokens of 32, and a prompt is at most 20 words. Attention heads divide by 2 and 4.
"""

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from enfold.shapes.scenes import PICTURE_SIZE, words

__all__ = [
    "GENERATION_DEFAULTS",
    "LATENT_CHANNELS",
    "PROMPT_TOKENS",
    "make_autoencoder",
    "make_clip",
    "make_denoiser",
    "make_pipeline",
    "make_t5",
    "make_tokenizer",
]

PROMPT_TOKENS = 20
LATENT_CHANNELS = 8
GENERATION_DEFAULTS: dict[str, int | float | str] = {
    "height": PICTURE_SIZE,
    "width": PICTURE_SIZE,
    "num_inference_steps": 24,
    "true_cfg_scale": 2.0,
    "negative_prompt": "",
    "max_sequence_length": PROMPT_TOKENS,
}
"""What a call that leaves them out means; FluxPipeline's own defaults are 1024 x 1024 pixels and 512 tokens."""

_SPECIAL = ["<pad>", "</s>", "<unk>"]
_PAD, _END = 0, 1
_CLIP_WIDTH = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the word tokenizer that both text encoders use: lower case, one token a word, `</s>` at the end."""
    vocabulary = {word: index for index, word in enumerate([*_SPECIAL, *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(behavior="removed")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", _END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=PROMPT_TOKENS,
    )


def make_t5(vocab_size: int) -> T5EncoderModel:
    """Return the text encoder whose hidden states the denoiser attends to."""
    return T5EncoderModel(
        T5Config(
            vocab_size=vocab_size,
            d_model=192,
            d_kv=48,
            num_heads=4,
            d_ff=384,
            num_layers=3,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=20,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=_PAD,
            eos_token_id=_END,
        )
    )


def make_clip(vocab_size: int) -> CLIPTextModel:
    """Return the text encoder whose pooled output goes beside the time embedding."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocab_size,
            hidden_size=_CLIP_WIDTH,
            intermediate_size=2 * _CLIP_WIDTH,
            projection_dim=_CLIP_WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=PROMPT_TOKENS,
            pad_token_id=_PAD,
            bos_token_id=_END,
            eos_token_id=_END,
        )
    )


def make_denoiser() -> FluxTransformer2DModel:
    """Return the DiT: one double-stream block, four single-stream blocks, 160 wide."""
    return FluxTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=4,
        attention_head_dim=40,
        num_attention_heads=4,
        joint_attention_dim=192,
        pooled_projection_dim=_CLIP_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 16, 16),
    )


def make_autoencoder(scaling_factor: float = 1.0, shift_factor: float = 0.0) -> AutoencoderKL:
    """Return the autoencoder, 64 x 64 pictures to 8 x 8 latents; the factors bring these to mean 0 and deviation 1."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 32, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=PICTURE_SIZE,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def make_pipeline(
    t5: T5EncoderModel, clip: CLIPTextModel, denoiser: FluxTransformer2DModel, autoencoder: AutoencoderKL
) -> FluxPipeline:
    """Join the parts to a Diffusers pipeline."""
    tokenizer = make_tokenizer()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=autoencoder,
        text_encoder=clip,
        tokenizer=tokenizer,
        text_encoder_2=t5,
        tokenizer_2=tokenizer,
        transformer=denoiser,
    )
