"""load_encoder: bits of from_pretrained in every layout, only this rank's slices in memory, strict about names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from cells import differences
from ranks import Ranks
from safetensors.torch import load_file, save_file

import enfold
from enfold.errors import CheckpointError, ConfigError, EnfoldError

NAMES = ("T5", "UMT5", "CLIP text + projection", "SigLIP vision", "ModernBERT", "Qwen3", "Gemma 3 text", "Qwen2.5-VL")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("models")
    saved = {}
    for name in NAMES:
        saved[name] = root / name.replace(" ", "")
        models.build(name, torch.bfloat16).save_pretrained(saved[name], max_shard_size="20MB")
    assert (saved["T5"] / "model.safetensors.index.json").is_file(), "the index is part of what is tested"
    yield saved


def _load(group: Any, folder: str, name: str, layout: tuple[int, int, int], options: dict[str, Any]) -> list[str]:
    cls = type(models.BY_NAME[name].build())
    want = cls.from_pretrained(folder, dtype=options.get("dtype"))
    batch = models.inputs(name, 5, want.dtype)
    module = enfold.load_encoder(
        folder, layout=enfold.Layout(*layout), group=group, architecture=cls.__name__, **options
    )
    assert not any(parameter.is_meta for parameter in module.parameters())
    return differences(
        want(**batch, output_hidden_states=True, use_cache=False) if "use_cache" in _names(want) else
        want(**batch, output_hidden_states=True),
        module(**batch, output_hidden_states=True),
    )  # fmt: skip


def _names(module: Any) -> list[str]:
    import inspect

    return list(inspect.signature(module.forward).parameters)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world,layout", [(1, (1, 1, 1)), (2, (1, 1, 2)), (4, (1, 2, 2))])
def test_bits_of_from_pretrained(
    ranks: Ranks, folders: dict[str, Path], name: str, world: int, layout: tuple[int, int, int]
) -> None:
    for texts in ranks.run(_load, world, str(folders[name]), name, layout, {}):
        assert not texts


def test_another_precision(ranks: Ranks, folders: dict[str, Path]) -> None:
    for dtype in (torch.float32, torch.float16):
        for texts in ranks.run(_load, 2, str(folders["T5"]), "T5", (1, 1, 2), {"dtype": dtype}):
            assert not texts


def _share(group: Any, folder: str, layout: tuple[int, int, int]) -> tuple[int, int]:
    module = enfold.load_encoder(folder, layout=enfold.Layout(*layout), group=group)
    unique = {id(p): p.numel() * p.element_size() for p in module.parameters()}
    return sum(unique.values()), module.plan.bytes_per_rank


@pytest.mark.parametrize("name", ["T5", "Qwen3", "ModernBERT"])
def test_the_plan_counts_the_bytes_of_a_rank(ranks: Ranks, folders: dict[str, Path], name: str) -> None:
    answers = ranks.run(_share, 4, str(folders[name]), (1, 1, 4))
    assert max(held for held, _ in answers) == answers[0][1]


def _refusal(group: Any, folder: str, options: dict[str, Any]) -> tuple[str, str]:
    try:
        enfold.load_encoder(folder, group=group, **options)
    except EnfoldError as error:
        return type(error).__name__, str(error)
    return "", ""


def _copy(source: Path, target: Path, change: Any) -> Path:
    """Copy a checkpoint into one file, with its tensors changed."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors.update(load_file(file))
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


KEY = "encoder.block.1.layer.0.SelfAttention.o.weight"


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda tensors: tensors.pop(KEY), ["missing", KEY]),
        (lambda tensors: tensors.update({KEY + "x": torch.zeros(1)}), ["unexpected", KEY + "x"]),
        (lambda tensors: tensors.update({KEY: torch.zeros(3, 5)}), ["shape", KEY, "[3, 5]", "[1088, 1088]"]),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_strict(ranks: Ranks, folders: dict[str, Path], tmp_path: Path, change: Any, words: list[str]) -> None:
    folder = _copy(folders["T5"], tmp_path / "changed", change)
    for kind, text in ranks.run(_refusal, 2, str(folder), {"mode": "fold"}):
        assert kind == CheckpointError.__name__
        assert all(word in text for word in words), text


def test_pickle_is_refused_with_the_reason(ranks: Ranks, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _copy(folders["T5"], tmp_path / "pickled", lambda tensors: None)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for kind, text in ranks.run(_refusal, 2, str(folder), {"mode": "fold"}):
        assert kind == CheckpointError.__name__ and "allow_pickle" in text and "runs code" in text
    for texts in ranks.run(_load, 2, str(folder), "T5", (1, 1, 2), {"allow_pickle": True}):
        assert not texts


def test_folders_that_are_no_encoder(tmp_path: Path, folders: dict[str, Path]) -> None:
    assert "no config.json" in _refusal(None, str(tmp_path), {})[1]
    assert "no local folder" in _refusal(None, str(tmp_path / "nowhere"), {})[1]
    (tmp_path / "model_index.json").write_text("{}")
    assert "subfolder=" in _refusal(None, str(tmp_path), {})[1]
    (tmp_path / "config.json").write_text((folders["T5"] / "config.json").read_text())
    assert "no *.safetensors" in _refusal(None, str(tmp_path), {})[1]
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 40)
    assert "no whole safetensors" in _refusal(None, str(tmp_path), {})[1]
    kind, text = _refusal(None, str(folders["T5"]), {"architecture": "NoSuchModel"})
    assert kind == ConfigError.__name__ and "NoSuchModel" in text
    kind, text = _refusal(None, str(folders["T5"]), {"dtype": "int8"})
    assert kind == ConfigError.__name__ and "bfloat16" in text


def test_an_index_does_not_lead_out_of_its_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "config.json").write_text((folders["T5"] / "config.json").read_text())
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    assert "has no such file" in _refusal(None, str(folder), {})[1]


def test_larger_checkpoints_give_their_encoder(tmp_path: Path) -> None:
    """T5 with its decoder, BERT with a masked-language head and no pooler, a language model with its head."""
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    cases = [
        (
            hf.T5ForConditionalGeneration(hf.T5Config(d_model=128, d_ff=256, num_layers=1, num_heads=2)),
            hf.T5EncoderModel,
        ),
        (hf.BertForMaskedLM(hf.BertConfig(**small)), hf.BertModel),
        (hf.Qwen2ForCausalLM(hf.Qwen2Config(**small, num_key_value_heads=1, vocab_size=99)), hf.Qwen2Model),
        (hf.ViTForImageClassification(hf.ViTConfig(**small)), hf.ViTModel),
    ]
    for number, (whole, encoder) in enumerate(cases):
        whole.save_pretrained(tmp_path / str(number))
        module = enfold.load_encoder(tmp_path / str(number))
        assert type(module) is encoder
        mine = dict(module.state_dict())
        theirs = whole.state_dict()
        for name, tensor in mine.items():
            match = [key for key in theirs if key == name or key.endswith(f".{name}")]
            assert match and torch.equal(tensor, theirs[match[0]]), name


def test_two_encoders_in_one_checkpoint_must_be_named(tmp_path: Path) -> None:
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.CLIPConfig(text_config=small, vision_config={**small, "image_size": 28, "patch_size": 14})
    hf.CLIPModel(config).save_pretrained(tmp_path)
    kind, text = _refusal(None, str(tmp_path), {})
    assert kind == ConfigError.__name__ and "architecture=" in text
    for name in ("CLIPTextModel", "CLIPVisionModel", "CLIPTextModelWithProjection"):
        want = getattr(hf, name).from_pretrained(tmp_path)
        got = enfold.load_encoder(tmp_path, architecture=name)
        assert type(got) is type(want)
        assert all(torch.equal(tensor, got.state_dict()[key]) for key, tensor in want.state_dict().items())


def _peak(group: Any, folder: str, layout: tuple[int, int, int]) -> tuple[int, int]:
    """Return how far the resident memory rose while loading, and the bytes of this rank's weights."""
    import gc

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    module = enfold.load_encoder(folder, layout=enfold.Layout(*layout), group=group)
    rise = _status("VmHWM") - before
    unique = {id(p): p.numel() * p.element_size() for p in module.parameters()}
    return rise, sum(unique.values())


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def test_peak_memory_of_a_folded_load(tmp_path: Path) -> None:
    """At most 1.15 times the rank's share: a fresh process each time, for memory that was freed is used again."""
    config = hf.T5Config(d_model=4096, d_ff=10240, num_heads=64, d_kv=64, num_layers=2, vocab_size=32128)
    hf.T5EncoderModel(config).to(torch.bfloat16).save_pretrained(tmp_path)
    own = Ranks(2)
    try:
        small = hf.T5EncoderModel(hf.T5Config(d_model=128, d_ff=256, num_heads=2, num_layers=1))
        small.save_pretrained(tmp_path / "small")
        own.run(_share, 2, str(tmp_path / "small"), (1, 1, 2))  # imports what loading imports
        answers = own.run(_peak, 2, str(tmp_path), (1, 1, 2))
    finally:
        own.stop()
    for rise, share in answers:
        print(f"rise {rise / 2**20:.0f} MiB, share {share / 2**20:.0f} MiB, ratio {rise / share:.3f}")
        assert rise <= 1.15 * share


def _one_rank_lacks(group: Any, good: str, bad: str) -> tuple[str, str]:
    return _refusal(group, bad if dist.get_rank(group) == 1 else good, {"mode": "fold"})


def test_a_rank_that_can_not_load_stops_them_all(ranks: Ranks, folders: dict[str, Path], tmp_path: Path) -> None:
    answers = set(ranks.run(_one_rank_lacks, 2, str(folders["T5"]), str(tmp_path)))
    assert len(answers) == 1
    kind, text = answers.pop()
    assert kind == "EncodeError" and "rank 1 failed in load_encoder: CheckpointError" in text
    for texts in ranks.run(_load, 2, str(folders["T5"]), "T5", (1, 1, 2), {}):
        assert not texts
