"""The examples, as a reader would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 120


def run(script: str, *arguments: str, num_ranks: int = 2) -> str:
    """Run a script under torchrun (alone with 1 rank) and return what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *(torchrun if num_ranks > 1 else []), str(EXAMPLES / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_one_encoder() -> None:
    lines = run("one_encoder.py", "--mode", "fold").splitlines()
    assert len(lines) == 3, "rank 0 alone prints"
    assert lines[0].startswith("plan: BERT: fold, layout 1x1x2")
    assert lines[1] == "last_hidden_state: [3, 16, 384] torch.float32"
    assert lines[2] == "bits equal to the plain model: yes"


def test_one_encoder_without_torchrun() -> None:
    assert "bits equal to the plain model: yes" in run("one_encoder.py", "--mode", "replicate", num_ranks=1)


def test_a_pipeline() -> None:
    lines = run("diffusers_pipeline.py").splitlines()
    assert lines[0].startswith("text_encoder: CLIP text: dp (asked: auto), layout")
    assert lines[1].startswith("text_encoder_2: T5: dp (asked: auto), layout")
    assert lines[2] == "encode_prompt: [3, 128, 1088], [3, 1088], [128, 3]"
    assert lines[3:] == ["bits equal to the plain pipeline: yes"]


def test_a_vision_language_model() -> None:
    lines = run("vision_language.py", "--vision-tp-size", "2").splitlines()
    assert "layout 1x1x2" in lines[0]
    assert lines[1:] == ["4 images in 1 call of the tower", "tokens equal to the plain model's: yes"]
