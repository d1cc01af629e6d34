"""What users see can't drift: the names that enfold exports, the options of its commands, what importing it costs."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import enfold
from enfold import errors
from enfold.cli import encode
from enfold.cli.main import build_parser

OPTIONS = {
    "encode": "batch-size dp-size dtype encoder-parallel first-frame help input json max-length max-pixels "
    "max-tokens-per-call model-path num-gpus numerics output pooling skip-bad subfolder threads-per-rank timeout "
    "tp-size vision-block-size vision-dp-size vision-tp-size",
    "generate": "batching-max-size dp-size dtype embedding-cache-mib encoder-parallel fps guidance-scale height help "
    "json max-sequence-length measure-split model-path negative-prompt num-frames num-gpus num-images-"
    "per-prompt num-inference-steps numerics output-path prompt prompt-file ring-degree seed "
    "text-encoder-cpu-offload threads-per-rank timeout tp-size true-cfg-scale ulysses-degree whole-dit width",
    "serve": "api-key batching-delay-ms batching-max-size call-timeout dp-size dtype embedding-cache-mib encoder-"
    "parallel help host max-body-mib max-frames max-images max-inputs max-length max-pixels max-prompt-"
    "chars max-queue max-steps model-path model-type num-gpus numerics pooling port request-timeout ring-"
    "degree served-model-name subfolder text-encoder-cpu-offload threads-per-rank timeout tp-size "
    "ulysses-degree whole-dit",
    "plan": "batching-max-size dp-size dtype encoder-parallel help json model-path num-gpus numerics subfolder tp-size "
    "vision-block-size vision-dp-size vision-tp-size",
    "verify": "batch-size dtype help json length model-path num-gpus numerics subfolder threads-per-rank timeout "
    "vision",
}


def test_all_is_what_can_be_imported() -> None:
    assert enfold.__all__ == sorted(enfold.__all__, key=lambda name: (name.islower(), name))
    for name in enfold.__all__:
        assert getattr(enfold, name).__name__ == name
    assert set(dir(enfold)) == {*enfold.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no_such_name"):
        enfold.no_such_name  # noqa: B018


def test_options_of_the_commands() -> None:
    subparsers = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = {
        name: " ".join(
            sorted(flag[2:] for action in parser._actions for flag in action.option_strings if flag.startswith("--"))
        )
        for name, parser in subparsers.choices.items()
    }
    assert found == OPTIONS


def test_defaults_that_are_written_twice() -> None:
    """The parser must not import what knows them: torch and Pillow."""
    from enfold import image_engine
    from enfold.vision import images

    assert encode.DEFAULT_MAX_TOKENS == image_engine.DEFAULT_MAX_TOKENS
    assert encode.DEFAULT_MAX_PIXELS == images.MAX_PIXELS


def test_importing_enfold_brings_no_torch() -> None:
    code = "import sys, enfold; enfold.plan_encoder; enfold.Layout; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_error_is_an_enfold_error() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(classes) == 12
    assert all(issubclass(each, errors.EnfoldError) for each in classes)
    assert all(each.__name__ in (errors.__doc__ or "") for each in classes)
