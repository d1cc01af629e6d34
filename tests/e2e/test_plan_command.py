"""`enfold plan` as a user runs it: on folders with config files only."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

T5_XXL = {
    "model_type": "t5",
    "d_model": 4096,
    "d_ff": 10240,
    "num_heads": 64,
    "num_layers": 24,
    "feed_forward_proj": "gated-gelu",
    "torch_dtype": "bfloat16",
}
CLIP_L = {"model_type": "clip_text_model", "hidden_size": 768, "num_attention_heads": 12, "torch_dtype": "bfloat16"}
CLIP_H = {"model_type": "clip_vision_model", "hidden_size": 1280, "num_attention_heads": 16, "num_hidden_layers": 32}
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "dtype": "bfloat16"}
PIPELINE = {
    "text_encoder": ("CLIPTextModel", CLIP_L),
    "text_encoder_2": ("T5EncoderModel", T5_XXL),
    "text_encoder_3": ("LlamaForCausalLM", LLAMA),
    "image_encoder": ("CLIPVisionModelWithProjection", CLIP_H),
}
VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096}
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {"model_type": "qwen3_vl_text", "hidden_size": 4096, "num_hidden_layers": 36, "dtype": "bfloat16"},
    "vision_config": {"model_type": "qwen3_vl", "patch_size": 16, **VISION},
}
QWEN2_5_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584, "patch_size": 14, "in_chans": 3},
}
SIGLIP = {"model_type": "siglip", "vision_config": {"image_size": 384, "patch_size": 14, "hidden_size": 1152}}
SIGLIP["vision_config"] |= {"num_attention_heads": 16, "num_hidden_layers": 27}
TIME_LIMIT_S = 0.5


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    folder = tmp_path / "pipeline"
    index: dict[str, Any] = {"_class_name": "AnyPipeline", "vae": ["diffusers", "AutoencoderKL"]}
    index["tokenizer"] = ["transformers", "CLIPTokenizer"]
    index["feature_extractor"] = [None, None]
    for name, (class_name, config) in PIPELINE.items():
        index[name] = ["transformers", class_name]
        write(folder / name / "config.json", config)
    write(folder / "model_index.json", index)
    return folder


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path.parent


def test_one_row_per_encoder_that_fits_the_terminal(commands: Any, pipeline: Path) -> None:
    done = commands.run("plan", "--model-path", pipeline, "--num-gpus", 4)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    rows = {line.split()[0]: line.split() for line in lines if line.split() and line.split()[0] in PIPELINE}
    assert {"T5", "4096", "64", "24", "4.76B", "fold", "1x1x4", "2.22", "(25%)", "8.87"} <= set(
        next(line for line in lines if line.startswith("text_encoder_2 ")).split()
    )
    assert list(rows) == list(PIPELINE)
    assert "text_encoder_2 (bfloat16): one prompt per call and hidden size 4096 >= 4096" in lines
    assert "image_encoder (float32): one image per call and hidden size 1280 < 4096: too narrow to fold" in lines


def test_json_is_one_document(commands: Any, pipeline: Path) -> None:
    arguments = ("--num-gpus", 4, "--encoder-parallel", "dp", "--batching-max-size", 8, "--json")
    document = json.loads(commands.run("plan", "--model-path", pipeline, *arguments).stdout)
    assert document["num_gpus"] == 4
    assert set(document["encoders"]) == set(PIPELINE)
    assert {plan["resolved"] for plan in document["encoders"].values()} == {"dp"}
    assert document["encoders"]["text_encoder_2"]["bytes_per_rank"] == 2 * 4_762_310_656


def test_a_subfolder_and_a_dtype(commands: Any, pipeline: Path) -> None:
    arguments = ("--subfolder", "text_encoder_2", "--num-gpus", 4, "--tp-size", 2, "--dtype", "float32", "--json")
    plans = json.loads(commands.run("plan", "--model-path", pipeline, *arguments).stdout)["encoders"]
    assert list(plans) == ["text_encoder_2"]
    assert plans["text_encoder_2"]["layout"] == {"replicate": 1, "dp": 2, "tp": 2}
    assert plans["text_encoder_2"]["dtype"] == "float32"


def test_both_towers_of_one_config(commands: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "clip" / "config.json", {"model_type": "clip", "architectures": ["CLIPModel"]})
    plans = json.loads(commands.run("plan", "--model-path", folder, "--json").stdout)["encoders"]
    assert {name: plan["family"] for name, plan in plans.items()} == {"text": "CLIP text", "vision": "CLIP vision"}


def test_dp_that_stays_idle_names_the_flag(commands: Any, pipeline: Path) -> None:
    done = commands.run("plan", "--model-path", pipeline, "--num-gpus", 2, "--encoder-parallel", "dp")
    assert "--batching-max-size" in done.stdout
    assert "dp was asked, but" in done.stdout


def test_an_unknown_family_is_planned_without_a_table(commands: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "gpt2" / "config.json", {"model_type": "gpt2", "n_embd": 1600})
    done = commands.run("plan", "--model-path", folder, "--num-gpus", 2, "--batching-max-size", 4)
    assert done.returncode == 0
    assert "unknown (gpt2)" in done.stdout
    refused = commands.run("plan", "--model-path", folder, "--num-gpus", 2, "--encoder-parallel", "fold")
    assert refused.returncode == 2
    assert "ModernBERT" in refused.stderr
    assert "use dp or replicate" in refused.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b'{"model_type": "t5\xff"}', "is not UTF-8: byte 18 is 0xff"),
        (b"[1]", "holds a list"),
        (b"null", "holds a NoneType"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "model_type=None"),
        (b'{"model_type": "t5", "d_model": "x"}', "d_model='x'"),
        (b'{"model_type": "bert", "hidden_size": 0}', "hidden_size=0"),
        (b'{"model_type": "llama", "num_hidden_layers": -3}', "num_hidden_layers=-3"),
        (b'{"model_type": "t5", "d_model": NaN}', "d_model=nan"),
    ],
)
def test_a_broken_config_names_the_file_and_the_key(commands: Any, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_bytes(content)
    done = commands.run("plan", "--model-path", path.parent, "--num-gpus", 2)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"{path}: {words}" in done.stderr


def test_a_broken_component_names_its_file(commands: Any, pipeline: Path) -> None:
    path = pipeline / "text_encoder_2" / "config.json"
    write(path, {**T5_XXL, "num_heads": "many"})
    done = commands.run("plan", "--model-path", pipeline)
    assert (done.returncode, f"{path}: num_heads='many'" in done.stderr) == (2, True)
    path.unlink()
    done = commands.run("plan", "--model-path", pipeline)
    assert (done.returncode, f"{path}: can't be read: No such file" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tp-size", 3), "tp_size=3 does not divide the 4 ranks; use one of 1, 2, 4"),
        (("--tp-size", 4, "--dp-size", 2), "tp_size=4 x dp_size=2 = 8 does not divide the 4 ranks"),
        (("--encoder-parallel", "replicate", "--tp-size", 2), "mode replicate contradicts"),
        (("--tp-size", 0), "0 is smaller than 1"),
        (("--subfolder", "nothing"), "is no folder"),
        (("--model-path", "./nowhere"), "there is no such folder"),
        (("--model-path", "nobody/nothing"), "download the model and give its folder"),
    ],
)
def test_wrong_arguments_exit_2_with_the_remedy(
    commands: Any, pipeline: Path, arguments: tuple[object, ...], words: str
) -> None:
    done = commands.run("plan", "--model-path", pipeline, "--num-gpus", 4, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert words in done.stderr


def test_an_empty_folder_and_a_pipeline_without_encoders(commands: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = commands.run("plan", "--model-path", tmp_path / "empty")
    assert (done.returncode, "config.json: can't be read" in done.stderr) == (2, True)
    folder = write(tmp_path / "bare" / "model_index.json", {"vae": ["diffusers", "AutoencoderKL"]})
    done = commands.run("plan", "--model-path", folder)
    assert (done.returncode, "names no text or image encoder" in done.stderr) == (2, True)


# Vision towers.


@pytest.fixture
def qwen3_vl(tmp_path: Path) -> Path:
    return write(tmp_path / "qwen3-vl" / "config.json", QWEN3_VL)


def words_of(output: str) -> str:
    """Return the output on one line, without the breaks that make it fit a terminal."""
    return " ".join(output.split())


def test_a_vision_language_model_has_a_row_for_its_tower(commands: Any, qwen3_vl: Path) -> None:
    done = commands.run("plan", "--model-path", qwen3_vl, "--num-gpus", 4)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    row = next(line for line in lines if line.startswith("vision "))
    for cell in ("Qwen3-VL vision", "1152", "16", "27", "576.4M", "dp", "1x4x1", "1.07 (100%)"):
        assert cell in row
    said = words_of(done.stdout)
    assert "vision (bfloat16): images of a call are spread over the 4 ranks, each with the whole tower" in said
    assert "a block holds 2048 patches = 1024 x 512 pixels at 16 pixels per patch" in said
    assert "the largest image admitted has 65536 patches = 4096 x 4096 pixels" in said
    assert "the language model (hidden size 4096, 36 layers) is left as it is" in said
    assert "prompt" not in said


@pytest.mark.parametrize(
    ("arguments", "resolved", "layout", "reason"),
    [
        (
            ("--vision-tp-size", 2),
            "combined",
            "1x2x2",
            "layout 1x2x2 was asked: images of a call are spread over",
        ),
        (("--vision-dp-size", 2), "combined", "1x2x2", "up to 8 of 16 heads each"),
        (("--vision-tp-size", 4), "fold", "1x1x4", "up to 4 of 16 heads each"),
        (("--vision-tp-size", 1, "--vision-dp-size", 1), "dp", "1x4x1", "images of a call are spread over the 4 ranks"),
        (("--vision-tp-size", 2, "--vision-dp-size", 2), "combined", "1x2x2", "2 groups of 2"),
        (("--encoder-parallel", "fold"), "fold", "1x1x4", "fold was asked: 4 ranks share each image"),
        (("--encoder-parallel", "dp"), "dp", "1x4x1", "dp was asked: images of a call"),
        (("--encoder-parallel", "replicate"), "replicate", "4x1x1", "each of the 4 ranks encodes every image"),
        (("--batching-max-size", 8), "dp", "1x4x1", "images of a call are spread over the 4 ranks"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_sizes_and_modes_of_a_tower(
    commands: Any, qwen3_vl: Path, arguments: tuple[object, ...], resolved: str, layout: str, reason: str
) -> None:
    done = commands.run("plan", "--model-path", qwen3_vl, "--num-gpus", 4, "--json", *arguments)
    assert done.stderr == ""
    plan = json.loads(done.stdout)["encoders"]["vision"]
    assert plan["resolved"] == resolved
    assert "x".join(map(str, plan["layout"].values())) == layout
    assert reason in plan["reasons"][0]
    assert plan["warnings"] == []
    whole, most = plan["replicate_bytes"], plan["bytes_per_rank"]
    tp = plan["layout"]["tp"]
    assert most == whole if tp == 1 else whole / tp < most < 1.1 * whole / tp


def test_the_block_size_is_shown_in_pixels(commands: Any, qwen3_vl: Path) -> None:
    said = words_of(commands.run("plan", "--model-path", qwen3_vl, "--vision-block-size", 4096).stdout)
    assert "a block holds 4096 patches = 1024 x 1024 pixels at 16 pixels per patch" in said
    said = words_of(commands.run("plan", "--model-path", qwen3_vl, "--vision-block-size", 2000).stdout)
    assert "a block holds 2000 patches = 800 x 640 pixels" in said
    said = words_of(commands.run("plan", "--model-path", qwen3_vl, "--vision-block-size", 16 * 127).stdout)
    assert "a block holds 2032 patches, about " in said


def test_a_tower_by_itself_is_one_row(commands: Any, tmp_path: Path) -> None:
    tower = {**VISION, "model_type": "qwen3_vl_vision", "dtype": "bfloat16"}
    folder = write(tmp_path / "tower" / "config.json", tower)
    plans = json.loads(commands.run("plan", "--model-path", folder, "--num-gpus", 2, "--json").stdout)["encoders"]
    assert {name: plan["family"] for name, plan in plans.items()} == {"tower": "Qwen3-VL vision"}
    assert not any("language model" in note for note in plans["tower"]["notes"])
    old = write(tmp_path / "old" / "config.json", {**tower, "model_type": "qwen3_vl"})
    again = json.loads(commands.run("plan", "--model-path", old, "--num-gpus", 2, "--json").stdout)["encoders"]
    assert again == {"old": plans["tower"]}


def test_qwen2_5_vl_is_a_text_encoder_and_has_a_tower(commands: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "qwen2.5-vl" / "config.json", QWEN2_5_VL)
    arguments = ("--num-gpus", 4, "--tp-size", 2, "--vision-tp-size", 4, "--batching-max-size", 4)
    done = commands.run("plan", "--model-path", folder, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "Qwen2.5-VL vision " in done.stdout, "short names leave room for the family"
    plans = json.loads(commands.run("plan", "--model-path", folder, *arguments, "--json").stdout)["encoders"]
    assert list(plans) == ["text", "vision"]
    assert plans["text"]["family"] == "Qwen2.5-VL"
    assert plans["text"]["layout"] == {"replicate": 1, "dp": 2, "tp": 2}
    assert plans["text"]["notes"][0] == "the vision tower (visual) stays whole on every rank"
    assert "text encoder of a pipeline" in plans["text"]["notes"][1]
    assert plans["vision"]["layout"] == {"replicate": 1, "dp": 1, "tp": 4}
    assert plans["vision"]["dtype"] == "bfloat16"
    assert any("(hidden size 3584, 28 layers) is left as it is" in note for note in plans["vision"]["notes"])
    assert any("= 896 x 448 pixels at 14 pixels per patch" in note for note in plans["vision"]["notes"])


def test_qwen2_5_vl_in_a_pipeline_is_one_text_encoder(commands: Any, tmp_path: Path) -> None:
    index = {"text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"]}
    folder = write(tmp_path / "qwen-image" / "model_index.json", index)
    write(folder / "text_encoder" / "config.json", QWEN2_5_VL)
    plans = json.loads(commands.run("plan", "--model-path", folder, "--num-gpus", 4, "--json").stdout)["encoders"]
    assert {name: (plan["family"], plan["hidden_size"]) for name, plan in plans.items()} == {
        "text_encoder": ("Qwen2.5-VL", 3584)
    }
    assert plans["text_encoder"]["notes"] == ["the vision tower (visual) stays whole on every rank"]


def test_a_siglip_tower_is_spread_by_rows_unless_vision_sizes_are_given(commands: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "siglip" / "config.json", SIGLIP)
    said = words_of(commands.run("plan", "--model-path", folder, "--num-gpus", 4).stdout)
    assert "vision (float32): one image per call and hidden size 1152 < 4096: too narrow to fold" in said
    assert "block" not in said
    sized = ("--num-gpus", 4, "--vision-tp-size", 2, "--json")
    plans = json.loads(commands.run("plan", "--model-path", folder, *sized).stdout)["encoders"]
    assert plans["text"]["layout"] == {"replicate": 4, "dp": 1, "tp": 1}
    assert plans["vision"]["layout"] == {"replicate": 1, "dp": 2, "tp": 2}
    assert plans["vision"]["notes"] == ["every image is 27 x 27 = 729 patches; a block of 2048 patches holds 2 of them"]
    small = ("--num-gpus", 4, "--vision-block-size", 512)
    said = words_of(commands.run("plan", "--model-path", folder, *small).stdout)
    assert "a block of 512 patches is too small for one: each gets a wider block of its own" in said
    assert "1x4x1" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vision-tp-size", 3), "vision tp_size=3 does not divide the 4 ranks; use one of 1, 2, 4"),
        (("--vision-dp-size", 8), "vision dp_size=8 does not divide the 4 ranks; use one of 1, 2, 4"),
        (
            ("--vision-tp-size", 1, "--vision-dp-size", 2),
            "vision tp_size=1 x dp_size=2 = 2 must be the 4 ranks; with tp_size=1 use dp_size=4",
        ),
        (("--vision-tp-size", 0), "0 is smaller than 1"),
        (("--vision-tp-size", "two"), "'two' is not a whole number"),
        (("--vision-block-size", 100), "enfold: error: vision_attention_block_size=100 is no multiple of 16; use 96"),
        (
            ("--encoder-parallel", "fold", "--vision-dp-size", 4),
            "mode fold contradicts layout",
        ),
        (("--encoder-parallel", "replicate", "--vision-tp-size", 2), "mode replicate contradicts layout"),
        (
            ("--tp-size", 2),
            "--tp-size can't be used: this model's only encoder is a vision tower; use --vision",
        ),
        (("--tp-size", 2, "--dp-size", 2), "use --vision-tp-size and --vision-dp-size"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_vision_sizes_that_do_not_fit_exit_2_with_the_remedy(
    commands: Any, qwen3_vl: Path, arguments: tuple[object, ...], words: str
) -> None:
    done = commands.run("plan", "--model-path", qwen3_vl, "--num-gpus", 4, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("flag", ["--vision-tp-size", "--vision-dp-size", "--vision-block-size"])
def test_vision_options_without_a_tower_are_refused(commands: Any, tmp_path: Path, pipeline: Path, flag: str) -> None:
    folder = write(tmp_path / "t5" / "config.json", T5_XXL)
    done = commands.run("plan", "--model-path", folder, "--num-gpus", 4, flag, 16)
    assert done.returncode == 2
    assert f"{folder / 'config.json'}: {flag} can't be used: model_type='t5' has no vision tower" in done.stderr
    assert "leave it out" in done.stderr
    done = commands.run("plan", "--model-path", pipeline, "--num-gpus", 4, flag, 16)
    assert (done.returncode, f"{flag} can't be used: {pipeline} is a pipeline" in done.stderr) == (2, True)


def test_a_broken_tower_names_the_file_and_the_key(commands: Any, tmp_path: Path) -> None:
    for vision, words in (
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"deepstack_visual_indexes": [8, 8]}, "deepstack_visual_indexes=[8, 8]"),
        ({"spatial_merge_size": 3}, "vision_attention_block_size=2048 is no multiple of 3 x 3 = 9"),
    ):
        folder = write(tmp_path / "broken" / "config.json", {**QWEN3_VL, "vision_config": vision})
        done = commands.run("plan", "--model-path", folder, "--num-gpus", 2)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert f"{folder / 'config.json'}: {words}" in done.stderr


def test_heads_and_widths_that_stay_whole_are_named(commands: Any, tmp_path: Path) -> None:
    vision = {"hidden_size": 80, "intermediate_size": 120, "num_heads": 4, "out_hidden_size": 128}
    folder = write(tmp_path / "narrow" / "config.json", {**QWEN3_VL, "vision_config": vision})
    said = words_of(commands.run("plan", "--model-path", folder, "--num-gpus", 5, "--vision-tp-size", 5).stdout)
    assert "stays whole: attention: 4 heads < 5 ranks" in said
    assert "MLP up: 120 features are 1 units of 64 < 5 ranks" in said
    assert "deepstack merger out: 128 features are 2 units of 64 < 5 ranks" in said


def test_it_answers_at_once_and_imports_no_torch(commands: Any, pipeline: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert commands.run("plan", "--model-path", pipeline, "--num-gpus", 4).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: the clock would also count the other processes of a busy machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < TIME_LIMIT_S
    code = (
        "import sys; from enfold.cli.main import main; "
        f"main(['plan', '--model-path', {str(pipeline)!r}, '--num-gpus', '4']); "
        "print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
    )
    process = commands.start_python("-c", code)
    output, _ = process.communicate(timeout=60)
    assert output.splitlines()[-1] == "[]", sys.executable


def test_help_shows_an_example(commands: Any) -> None:
    done = commands.run("plan", "--help")
    assert done.returncode == 0
    assert "enfold plan --model-path ./flux --num-gpus 4" in done.stdout
