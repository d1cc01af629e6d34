"""`enfold serve`: a diffusion pipeline or a text encoder behind OpenAI's HTTP routes, on N ranks."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from enfold.cli.options import Option, add_option, add_options, positive_float, positive_int
from enfold.cli.pipeline_options import add_pipeline_options, make_spec, plan_pipeline_ranks
from enfold.cli.plan import find_folder
from enfold.cli.report import say
from enfold.errors import ConfigError, LayoutError
from enfold.shapes import model_folder

if TYPE_CHECKING:
    from enfold.server.backends import Backend
    from enfold.server.limits import Limits

ModelType = Literal["diffusion", "encoder"]
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
MIB = 2**20
LAST_PORT = 65535

EXAMPLE = """\
examples:
  enfold serve
  enfold serve --num-gpus 2 --encoder-parallel dp --batching-max-size 2 --batching-delay-ms 20
  enfold serve --model-path ./flux --num-gpus 4 --ulysses-degree 2 --dp-size 2
  enfold serve --model-path ./my-encoder --num-gpus 2 --batching-max-size 16 --pooling cls

Then open http://127.0.0.1:30000/, or give http://127.0.0.1:30000/v1 to an OpenAI client as its base URL.
"""

DIFFUSION_ONLY = ("ulysses_degree", "ring_degree", "tp_size", "whole_dit", "text_encoder_cpu_offload")
"""Options that mean nothing for an encoder."""


def count_from_zero(text: str) -> float:
    """Parse a number of at least 0, for argparse."""
    return 0.0 if text.strip() in ("0", "0.0") else positive_float(text)


def port_number(text: str) -> int:
    """Parse a port, for argparse; 0 takes a free one."""
    value = 0 if text == "0" else positive_int(text)
    if value > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{value} is no port; use 0 to {LAST_PORT}")
    return value


def _limit(help: str, type: Callable[[str], Any], default: Any, metavar: str = "N") -> Option:
    return Option(help, type, default, metavar=metavar)


LIMIT_OPTIONS: dict[str, tuple[str, Option]] = {
    "--max-queue": ("pending", _limit("requests that may wait; more get 429", positive_int, 128)),
    "--request-timeout": ("request_s", _limit("from a request to its answer", positive_float, 600.0, "SECONDS")),
    "--call-timeout": (
        "call_s",
        _limit("one batch; ranks that take longer are started again", positive_float, 300.0, "SECONDS"),
    ),
    "--max-body-mib": ("body_bytes", _limit("size of a request's body", positive_int, 32, "MIB")),
    "--max-prompt-chars": ("prompt_chars", _limit("characters of a text", positive_int, 8192)),
    "--max-images": ("images", _limit("pictures of one request", positive_int, 8)),
    "--max-pixels": ("pixels", _limit("width times height of a picture", positive_int, 2048 * 2048)),
    "--max-frames": ("frames", _limit("frames of a clip", positive_int, 257)),
    "--max-steps": ("steps", _limit("denoising steps", positive_int, 200)),
    "--max-inputs": ("inputs", _limit("texts of one request", positive_int, 256)),
}
"""The flag of each limit, with the field of Limits that it sets."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `serve` to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="answer HTTP requests with a diffusion pipeline or a text encoder",
        description="Serve a Diffusers pipeline or a text encoder on N ranks behind OpenAI's HTTP routes, with a page\n"
        "at /, /health and /metrics.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=port_number, default=30000, metavar="N", help="port to listen on; 0: any (default: 30000)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="refuse requests without `Authorization: Bearer KEY`")
    parser.add_argument(
        "--model-type", choices=("diffusion", "encoder"), help="what the model is (default: what its files say)"
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what requests call the model (default: the name of its folder)",
    )
    add_pipeline_options(parser, encoder_parallel="dp", batching_max_size=1)
    parser.add_argument(
        "--batching-delay-ms",
        type=count_from_zero,
        default=0.0,
        metavar="MS",
        help="how long a request may wait for others to share its batch (default: 0)",
    )
    encoders = parser.add_argument_group("encoders")
    add_options(encoders, "--subfolder")
    encoders.add_argument(
        "--pooling", choices=("mean", "cls", "last"), default="mean", help="of /v1/embeddings (default: mean)"
    )
    encoders.add_argument("--max-length", type=positive_int, metavar="N", help="tokens per text (default: the model's)")
    limits = parser.add_argument_group("limits")
    for flag, (_, option) in LIMIT_OPTIONS.items():
        add_option(limits, flag, option)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the options, take the port, then load and serve until SIGINT or SIGTERM."""
    _check_installed()
    path = args.model_path
    kind: ModelType = args.model_type or detect_model_type(find_folder(path, args.subfolder))
    make_backend, replica_size = (_diffusion if kind == "diffusion" else _encoder)(args, path)
    if args.encoder_parallel == "dp" and args.batching_max_size == 1 and replica_size > 1:
        say(
            f"warning: --encoder-parallel dp splits the prompts of a call over {replica_size} ranks, and with "
            "--batching-max-size 1 a call has one prompt: dp stays idle; raise --batching-max-size"
        )

    from enfold.server.running import bind, serve
    from enfold.server.service import Service, Settings

    settings = Settings(
        model=args.served_model_name or _model_name(path, args.subfolder),
        model_type=kind,
        batching_max_size=args.batching_max_size,
        batching_delay_s=args.batching_delay_ms / 1000,
        limits=_limits(args),
        api_key=args.api_key,
        pooling=args.pooling,
    )
    listening = bind(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    say(f"listening on http://{host}:{listening.getsockname()[1]}/ and loading {settings.model}")
    with listening:
        serve(Service(make_backend, settings), listening, say)
    return 0


def detect_model_type(folder: Path) -> ModelType:
    """Return what a folder holds, by its files; raise ConfigError where it is neither."""
    if (folder / "model_index.json").is_file():
        return "diffusion"
    if (folder / "config.json").is_file():
        return "encoder"
    raise ConfigError(f"{folder} has neither model_index.json (a pipeline) nor config.json (an encoder)")


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"`enfold serve` needs {', '.join(missing)}; install it with: pip install 'enfold[server]'")


def _model_name(path: str, subfolder: str | None) -> str:
    folder = Path(path).expanduser()
    if path == str(model_folder()):
        return "enfold-shapes"
    name = folder.resolve().name if folder.is_dir() else path
    return f"{name}/{subfolder}" if subfolder else name


def _limits(args: argparse.Namespace) -> Limits:
    from enfold.server.limits import Limits

    given = {name: getattr(args, flag.lstrip("-").replace("-", "_")) for flag, (name, _) in LIMIT_OPTIONS.items()}
    return Limits(**{**given, "body_bytes": given["body_bytes"] * MIB})


def _diffusion(args: argparse.Namespace, path: str) -> tuple[Callable[[], Backend], int]:
    """Return what makes the backend, and how many ranks a replica has; what can be refused is refused here."""
    if args.subfolder is not None:
        raise ConfigError(f"--subfolder {args.subfolder}: for encoders only, and {path} is a pipeline; leave it out")
    plan = plan_pipeline_ranks(args)

    def make() -> Backend:
        from enfold.server.backends import DiffusionBackend

        return DiffusionBackend(make_spec(args, plan), args.threads_per_rank)

    return make, plan.layout.replica_size


def _encoder(args: argparse.Namespace, path: str) -> tuple[Callable[[], Backend], int]:
    """As _diffusion, for one text encoder: --dp-size replicas of the ranks that remain."""
    wrong = [name for name in DIFFUSION_ONLY if getattr(args, name)]
    if wrong:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ConfigError(f"{flags}: for diffusion pipelines only, and {path} is an encoder; leave it out")
    num_replicas = args.dp_size or 1
    if args.num_gpus % num_replicas:
        raise LayoutError(f"--dp-size {num_replicas} does not divide --num-gpus {args.num_gpus}; change one of them")
    replica_size = args.num_gpus // num_replicas

    def make() -> Backend:
        from enfold.server.backends import EncoderBackend, EncoderOptions
        from enfold.worker import EncoderSpec

        spec = EncoderSpec(
            path=path,
            subfolder=args.subfolder,
            mode=args.encoder_parallel,
            dtype=args.dtype,
            numerics=args.numerics,
            timeout_s=args.timeout,
            batch_size=args.batching_max_size,
        )
        options = EncoderOptions(
            num_replicas, replica_size, max_length=args.max_length, threads_per_rank=args.threads_per_rank
        )
        return EncoderBackend(spec, options)

    return make, replica_size
