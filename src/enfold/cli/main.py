"""The `enfold` command: parse, run, and turn what goes wrong into one message and an exit code.

Exit codes: 0 done; 1 `verify` found a mode that is not exact, `encode` left out images that proved damaged on the way,
or a bug (with its traceback); 2 a wrong argument or input, or a lost rank; 130 Ctrl-C; 143 SIGTERM; 141 the reader of
standard output has gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType

from enfold.cli import encode, generate, plan, serve, verify
from enfold.errors import EnfoldError
from enfold.shapes import model_folder

EXIT_ERROR = 2
EXIT_CTRL_C = 128 + signal.SIGINT
EXIT_PIPE = 128 + signal.SIGPIPE
EXIT_TERM = 128 + signal.SIGTERM

EXAMPLES = """\
examples:
  enfold generate --prompt "a red circle above a blue square" --num-gpus 2
  enfold serve --num-gpus 2 --batching-max-size 2 --batching-delay-ms 20
  enfold plan --model-path ./flux --num-gpus 4
  enfold verify --model-path ./flux --subfolder text_encoder_2 --num-gpus 2
  enfold encode --model-path ./my-encoder --input captions.txt --output out.safetensors --num-gpus 2
  enfold encode --model-path ./qwen3-vl --input photos/ --output out.safetensors --num-gpus 2

enfold COMMAND --help shows the options of a command.
"""


class Terminated(BaseException):
    """SIGTERM, raised like Ctrl-C so that every `with` block cleans up."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command."""
    parser = argparse.ArgumentParser(
        prog="enfold",
        description="Spread Hugging Face encoders over ranks: fold the weights, split the batch, or both.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"enfold {version('enfold')}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in (generate, serve, encode, plan, verify):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to the arguments of the process."""
    args = build_parser().parse_args(argv)
    args.model_path = args.model_path or str(model_folder())
    try:
        _catch_signals()
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except EnfoldError as error:
        _print_error(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("enfold: interrupted", file=sys.stderr)
        return EXIT_CTRL_C
    except Terminated:
        return EXIT_TERM
    except BrokenPipeError:
        # Python flushes standard output once more at exit, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _print_error(error: EnfoldError) -> None:
    """Print the message; a rank's traceback (a note on the error) first, where the cause may be a bug."""
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)
    print(f"enfold: error: {error}", file=sys.stderr)


def _catch_signals() -> None:
    """Let the first SIGINT or SIGTERM unwind the command; a second one must not break its cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    signal.signal(signal.SIGINT, unwind)
    signal.signal(signal.SIGTERM, unwind)


if __name__ == "__main__":
    sys.exit(main())
