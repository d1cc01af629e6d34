"""Make the shipped model again: `python -m enfold.shapes.train --output DIR`, one to two hours on two CPU cores.

Five stages, each resumed where it was cut: the autoencoder learns to give back crops of drawn pictures; its decoder
goes on alone, on whole pictures; a set of pictures is drawn and encoded once; T5 learns to read; the denoiser and CLIP
learn together, from nothing, to predict the flow from pictures to noise (rectified flow, arXiv 2209.03003; times as in
arXiv 2403.03206). What step K sees hangs on the seed and K alone, so a run that was cut goes on as if it had not been.
Held-out prompts are never seen.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch import Tensor, nn
from torch.optim import swa_utils
from transformers import T5EncoderModel

from enfold.shapes import recipe
from enfold.shapes.reading import Reader, labels_of, look_around, reading_loss
from enfold.shapes.scenes import PICTURE_SIZE, Scene, draw_scenes, is_held_out, random_scene, read_prompt, write_prompt
from enfold.shapes.steps import DECAY_SHARE, SAVE_EVERY, learn, set_rate, steps

__all__ = ["main"]

AUTOENCODER_STEPS = 3500
DECODER_STEPS = 1000
DENOISER_STEPS = 28000
READING_STEPS = 600
NUM_PICTURES = 49152
_CROP_SIZE = 32
_POOL_SIZE = 2048  # pictures that the autoencoder's batches are cut from, for 500 steps
_ENCODED_AT_ONCE = 512  # pictures
_EMA_DECAY = 0.998
_EMPTY_PROMPTS = 0.1  # share; what guidance without a prompt needs
_MEAN_LOGIT_TIME = 0.8  # nearer to noise, where it is decided what stands where
_PURE_NOISE = 0.1  # share of the samples that start from noise alone, where the places of things are decided


def main() -> None:
    """Run the stages; print where the pipeline is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints and of the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--autoencoder-steps", type=int, default=AUTOENCODER_STEPS)
    parser.add_argument("--decoder-steps", type=int, default=DECODER_STEPS)
    parser.add_argument("--denoiser-steps", type=int, default=DENOISER_STEPS)
    parser.add_argument("--num-pictures", type=int, default=NUM_PICTURES)
    options = parser.parse_args()
    counts = (options.autoencoder_steps, options.decoder_steps, options.denoiser_steps)
    if min(counts) < 1 or options.num_pictures < _ENCODED_AT_ONCE:
        parser.error(
            f"steps {', '.join(map(str, counts))} and --num-pictures {options.num_pictures}: use at least 1 step each, "
            f"and {_ENCODED_AT_ONCE} pictures"
        )
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {options.output}: {error.strerror}; give a folder")
    autoencoder = train_autoencoder(options.output / "autoencoder.pt", options.autoencoder_steps, options.seed)
    refine_decoder(options.output / "decoder.pt", autoencoder, options.decoder_steps, options.seed)
    latents, prompts = encode_pictures(options.output / "latents.pt", autoencoder, options.num_pictures, options.seed)
    parts = train_denoiser(options.output / "denoiser.pt", latents, prompts, options.denoiser_steps, options.seed)
    pipeline = recipe.make_pipeline(parts["t5"], parts["clip"], parts["denoiser"], autoencoder)
    save_pipeline(pipeline, options.output / "model")
    print(f"the pipeline is in {options.output / 'model'}")


def save_pipeline(pipeline: FluxPipeline, folder: Path) -> None:
    """Write the pipeline in half precision, and beside it what a call without sizes and steps means."""
    pipeline.to(dtype=torch.float16).save_pretrained(folder)
    (folder / "generation_defaults.json").write_text(json.dumps(recipe.GENERATION_DEFAULTS, indent=2) + "\n")


def train_autoencoder(checkpoint: Path, num_steps: int, seed: int, batch_size: int = 32) -> AutoencoderKL:
    """Train on crops of drawn pictures; latents get a little noise, so that what the denoiser leaves does no harm."""
    torch.manual_seed(seed)
    model = recipe.make_autoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    pool = torch.empty(0)
    for step in steps("autoencoder", num_steps, checkpoint, {"model": model, "optimizer": optimizer}):
        set_rate(optimizer, 3e-3, step, num_steps, warm_up=100)
        pool = _pool(pool, "pictures", seed, step)
        rng = random.Random(f"{seed} autoencoder {step}")
        whole = step >= num_steps * (1 - DECAY_SHARE)
        count, size = (batch_size // 4, PICTURE_SIZE) if whole else (batch_size, _CROP_SIZE)
        pictures = _crops(pool, count, size, rng)
        latents = model.encode(pictures).latent_dist.mean
        loss = _loss_of_decoding(model, latents, pictures, rng) + 1e-3 * latents.pow(2).mean()
        learn(loss, model, optimizer)
        _say("autoencoder", step, loss)
    return model.eval()


def refine_decoder(
    checkpoint: Path, autoencoder: AutoencoderKL, num_steps: int, seed: int, batch_size: int = 8
) -> None:
    """Train the decoder alone, in place: the latents stay what they are, so the denoiser need not wait for it."""
    decoder = autoencoder.decoder
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    pool = torch.empty(0)
    for step in steps("decoder", num_steps, checkpoint, {"model": decoder, "optimizer": optimizer}):
        set_rate(optimizer, 2e-3, step, num_steps, warm_up=100)
        pool = _pool(pool, "pictures of the decoder", seed, step)
        rng = random.Random(f"{seed} decoder {step}")
        pictures = _crops(pool, batch_size, PICTURE_SIZE, rng)
        with torch.no_grad():
            latents = autoencoder.encode(pictures).latent_dist.mean
        loss = _loss_of_decoding(autoencoder, latents, pictures, rng)
        learn(loss, decoder, optimizer)
        _say("decoder", step, loss)


def _pool(pool: Tensor, name: str, seed: int, step: int) -> Tensor:
    """Return the drawn pictures that step `step` takes its batch from; new ones every 500 steps."""
    if len(pool) and step % 500:
        return pool
    rng = random.Random(f"{seed} {name} {step // 500}")
    return draw_scenes([random_scene(rng) for _ in range(_POOL_SIZE)], rng)


def _loss_of_decoding(model: AutoencoderKL, latents: Tensor, pictures: Tensor, rng: random.Random) -> Tensor:
    """Return how far the decoded latents are from the pictures; a little noise on them is what a denoiser leaves."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    output = model.decode(latents + 0.1 * torch.randn(latents.shape, generator=generator)).sample
    loss: Tensor = (output - pictures).abs().mean() + (output - pictures).pow(2).mean()
    return loss


def _say(name: str, step: int, loss: Tensor) -> None:
    if step % SAVE_EVERY == 0:
        print(f"{name} {step}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def encode_pictures(file: Path, autoencoder: AutoencoderKL, count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Draw and encode the training set once; set the factors by which latents get mean 0 and deviation 1.

    Returns packed latents [N, 16, 32] as Flux wants them and the prompts.
    """
    if file.exists():
        saved = torch.load(file)
    else:
        rng = random.Random(f"{seed} training set")
        latents, prompts = [], []
        for _ in range(count // _ENCODED_AT_ONCE):
            scenes: list[Scene] = []
            while len(scenes) < _ENCODED_AT_ONCE:
                scene = random_scene(rng)
                if not is_held_out(scene):
                    scenes.append(scene)
            latents.append(autoencoder.encode(draw_scenes(scenes, rng)).latent_dist.mean)
            prompts += [write_prompt(scene, long_form=rng.random() < 0.25) for scene in scenes]
        saved = {"latents": torch.cat(latents), "prompts": prompts}
        torch.save(saved, file)
    latents = saved["latents"]
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    autoencoder.register_to_config(scaling_factor=scale, shift_factor=shift)
    return _pack((latents - shift) * scale), saved["prompts"]


def train_denoiser(
    checkpoint: Path, latents: Tensor, prompts: list[str], num_steps: int, seed: int, batch_size: int = 32
) -> dict[str, Any]:
    """Train the denoiser, and CLIP with it, on a T5 that has learned to read; return their moving averages.

    T5 stays as it is: trained through noise, it unlearns the order of words within a thousand steps.
    """
    torch.manual_seed(seed + 1)
    tokenizer = recipe.make_tokenizer()
    size = len(tokenizer)
    ids, empty = _tokenize(tokenizer, prompts), _tokenize(tokenizer, [""])
    t5 = teach_reading(checkpoint.with_name("reader.pt"), size, ids, prompts, seed).requires_grad_(False).eval()
    parts: dict[str, Any] = {"clip": recipe.make_clip(size), "denoiser": recipe.make_denoiser()}
    model = nn.ModuleDict(parts).train()
    decay = swa_utils.get_ema_multi_avg_fn(_EMA_DECAY)  # type: ignore[no-untyped-call]
    average = swa_utils.AveragedModel(model, multi_avg_fn=decay)
    optimizer = torch.optim.AdamW(_with_fast_norms(model), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    places = {"img_ids": _image_ids(), "txt_ids": torch.zeros(recipe.PROMPT_TOKENS, 3)}
    recent: float | None = None
    for step in steps("denoiser", num_steps, checkpoint, {"model": model, "average": average, "optimizer": optimizer}):
        set_rate(optimizer, 1e-3, step, num_steps, warm_up=300)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(latents), (batch_size,), generator=generator)
        tokens = torch.where(torch.rand(batch_size, 1, generator=generator) < _EMPTY_PROMPTS, empty, ids[rows])
        times = torch.sigmoid(_MEAN_LOGIT_TIME + 1.2 * torch.randn(batch_size, generator=generator))
        times = torch.where(torch.rand(batch_size, generator=generator) < _PURE_NOISE, 1.0, times)
        noise = torch.randn(latents[rows].shape, generator=generator)
        mixed = noise * times[:, None, None] + latents[rows] * (1 - times[:, None, None])
        with torch.no_grad():
            hidden = t5(tokens)[0]
        flow = parts["denoiser"](
            hidden_states=mixed,
            encoder_hidden_states=hidden,
            pooled_projections=parts["clip"](tokens).pooler_output,
            timestep=times,
            return_dict=False,
            **places,
        )[0]
        loss = (flow - (noise - latents[rows])).pow(2).mean()
        learn(loss, model, optimizer)
        average.update_parameters(model)
        recent = loss.item() if recent is None else 0.99 * recent + 0.01 * loss.item()
        if step % SAVE_EVERY == 0:
            print(f"denoiser {step}: loss {recent:.4f}", flush=True)
    averaged: Any = average.module
    return {"t5": t5, **{name: averaged[name].eval() for name in parts}}


def teach_reading(
    checkpoint: Path, vocab_size: int, ids: Tensor, prompts: list[str], seed: int, batch_size: int = 32
) -> T5EncoderModel:
    """Return a new text encoder that can say what stands where; see reading.py."""
    torch.manual_seed(seed + 2)
    t5 = recipe.make_t5(vocab_size)
    look_around(t5)
    model = nn.ModuleDict({"t5": t5, "reader": Reader(t5.config.d_model)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    scenes = [read_prompt(prompt) for prompt in prompts]
    places, grounds = labels_of([scene for scene in scenes if scene is not None])
    for step in steps("reading", READING_STEPS, checkpoint, {"model": model, "optimizer": optimizer}):
        set_rate(optimizer, 1e-3, step, READING_STEPS, warm_up=100)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(ids), (batch_size,), generator=generator)
        loss, right = reading_loss(model["reader"](t5(ids[rows])[0]), (places[rows], grounds[rows]))
        learn(loss, model, optimizer)
        if step % 100 == 0:
            print(f"reading {step}: loss {loss.item():.4f}, {right:.0%} of the prompts without a mistake", flush=True)
    return t5


def _with_fast_norms(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in two groups, the norms of queries and keys with ten times the rate.

    Flux's tokens know their place by rotary angles alone, in few of a head's dimensions; only where these are scaled up
    can a token pick the words about its own place, and Adam moves a scale by no more than its rate in a step.
    """
    named = dict(model["denoiser"].named_parameters())  # type: ignore[index]
    norms = [parameter for name, parameter in named.items() if ".norm_" in name and "attn" in name]
    picked = set(map(id, norms))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in picked]
    return [{"params": rest}, {"params": norms, "faster": 10.0, "weight_decay": 0.0}]


def _crops(pictures: Tensor, count: int, size: int, rng: random.Random) -> Tensor:
    """Return `count` random crops, [count, 3, size, size]; small ones teach convolutions as well, and faster."""
    room = pictures.shape[-1] - size
    crops = []
    for _ in range(count):
        top, left = rng.randint(0, room), rng.randint(0, room)
        crops.append(pictures[rng.randrange(len(pictures)), :, top : top + size, left : left + size])
    return torch.stack(crops)


def _tokenize(tokenizer: Any, prompts: list[str]) -> Tensor:
    length = recipe.PROMPT_TOKENS
    tokens = tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    ids: Tensor = tokens.input_ids
    return ids


def _pack(latents: Tensor) -> Tensor:
    """Pack 2 x 2 latents into one token, channels first, as FluxPipeline does: [N, C, H, W] to [N, H/2 * W/2, 4C]."""
    count, channels, height, width = latents.shape
    tiles = latents.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(count, height * width // 4, channels * 4)


def _image_ids() -> Tensor:
    """Return the rotary places of the 4 x 4 tokens, [16, 3]: (0, row, column)."""
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3)


if __name__ == "__main__":
    main()
