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
    assert "image_encoder (float32): one prompt per call and hidden size 1280 < 4096: too narrow to fold" in lines


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
