"""Tiny random models of real classes, the commands as subprocesses, and a way to find processes by a marker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = "a an the red green blue fox whale circle square above below sings jumps over small large and one two".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
COMMAND_LIMIT_S = 150


def save_bert(folder: Path) -> None:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *(w for w in WORDS if len(w) > 1)]
    vocab = {word: number for number, word in enumerate(vocabulary)}
    BertTokenizerFast(vocab=vocab, model_max_length=128).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=128,
    )
    BertModel(config).eval().save_pretrained(folder)


def save_t5_pipeline(folder: Path) -> None:
    """Write what `encode` needs of a pipeline: text_encoder_2 (T5) and, beside it, tokenizer_2."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    vocab = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    ).save_pretrained(folder / "tokenizer_2")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(vocab), d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    T5EncoderModel(config).eval().save_pretrained(folder / "text_encoder_2")
    (folder / "model_index.json").write_text('{"text_encoder_2": ["transformers", "T5EncoderModel"]}')


def save_clip_vision(folder: Path) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    CLIPVisionModel(config).eval().save_pretrained(folder)


def marked(marker: str) -> list[int]:
    """Return the live processes whose environment or arguments hold the marker (zombies do not)."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            seen = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if marker.encode() in seen:
            pids.append(int(entry.name))
    return pids


def wait_until(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    """Return the first true answer of `condition`; fail after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.05)
    pytest.fail(f"not within {limit_s:g} s: {what}")


@dataclass
class Commands:
    """Runs `enfold` in subprocesses that carry a marker, so that a test can see what they leave behind."""

    folder: Path
    marker: str = field(default_factory=lambda: f"enfold-test-{uuid.uuid4().hex}")

    def environment(self) -> dict[str, str]:
        source = Path(__file__).parents[2] / "src"
        path = os.pathsep.join(filter(None, [str(source), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "COLUMNS": "120"}
        return {**os.environ, **offline, "ENFOLD_TEST_MARKER": self.marker, "TMPDIR": str(self.temporary)}

    @property
    def temporary(self) -> Path:
        folder = self.folder / "temporary"
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, *arguments: object, **keywords: Any) -> subprocess.Popen[str]:
        return self.start_python("-m", "enfold", *arguments, **keywords)

    def start_python(self, *arguments: object, **keywords: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **keywords}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.Popen(command, text=True, env=self.environment(), cwd=self.folder, **pipes)

    def run(self, *arguments: object, stdin: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            [sys.executable, "-m", "enfold", *map(str, arguments)],
            env=self.environment(),
            cwd=self.folder,
            capture_output=True,
            timeout=COMMAND_LIMIT_S,
            input=content,
            check=False,
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def check_nothing_left(self, limit_s: float = 10) -> None:
        """Fail if a process is left that was started here, or a file in the folder for temporary files."""
        wait_until(lambda: not marked(self.marker), limit_s, f"the end of processes {marked(self.marker)}")
        left = [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        assert left == []  # torch makes its compiler's folder when Diffusers is imported


# A long `encode` that is cut off: what was there before stays, and nothing is left behind.


def start_long_encode(commands: Commands, model: Path, source: Path, *options: object) -> tuple[Any, Path]:
    """Start a job on two ranks, over an output that is there already; return it and the output once it writes."""
    output = commands.folder / "out.safetensors"
    output.write_text("from before")
    arguments = ["--input", source, "--output", output, "--num-gpus", 2, "--threads-per-rank", 1, *options]
    job = commands.start("encode", "--model-path", model, *arguments, start_new_session=True)
    wait_until(lambda: job.poll() is not None or list(commands.folder.glob(".out*.tmp")), 90, "the job writes")
    assert job.poll() is None, job.communicate()[1]
    return job, output


def check_left_as_before(commands: Commands, output: Path) -> None:
    assert output.read_text() == "from before"
    assert list(commands.folder.glob(".out*")) == []
    commands.check_nothing_left()


def check_interrupted(commands: Commands, job: Any, output: Path, number: signal.Signals, code: int) -> None:
    with job:
        os.killpg(job.pid, number)
        _, said = job.communicate(timeout=20)
    assert job.returncode == code
    assert "Traceback" not in said
    check_left_as_before(commands, output)


def check_a_killed_rank(commands: Commands, job: Any, output: Path) -> None:
    with job:
        rank = max(pid for pid in marked(commands.marker) if pid != job.pid)
        os.kill(rank, signal.SIGKILL)
        _, said = job.communicate(timeout=20)
    assert job.returncode == 2
    assert f"(process {rank}) was killed by signal 9, SIGKILL" in said and "Traceback" not in said
    check_left_as_before(commands, output)
