"""`enfold encode` for texts: every text of a file through an encoder on N ranks, into one .safetensors file.

The file holds, for the n texts in input order:

    hidden_states  [tokens of all texts, hidden]   --pooling none: last hidden states, without padding
    offsets        int64 [n + 1]                   --pooling none: text i has rows offsets[i] to offsets[i + 1]
    embeddings     [n, hidden]                     any other pooling; mean is float32, cls and last as the model
    line           int64 [n]                       the number of the text's line in the input, from 1
    num_tokens     int64 [n]                       tokens of the text, special ones included, after truncation
    truncated      uint8 [n]                       1 where the text was cut off at --max-length
    inputs         uint8 [bytes]                   the texts as UTF-8 JSON lines: {"id"?, "text"}

and as metadata, all strings: enfold (version), model, subfolder, pooling, dtype, mode, numerics, plan (JSON), texts,
tokens, truncated, max_length.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.cli.report import say, stage
from enfold.cli.texts import Text, read_texts
from enfold.errors import InputError
from enfold.layout import Layout, resolve_layout

if TYPE_CHECKING:
    import torch

    from enfold.cli.tensor_file import TensorFile
    from enfold.engine import Engine, Tokens


TIMEOUT_S = 60.0


def run_texts(args: argparse.Namespace, output: Path) -> int:
    """Check everything that needs no model, then load, encode and write."""
    layout = _layout(args)
    source = _one_input(args.input)
    texts = read_texts(source)
    say(f"{len(texts)} texts from {'standard input' if source == '-' else source}")
    engine = _make_engine(args, layout)
    with stage("tokenizing", len(texts), "texts"):
        tokens = _tokenize(engine, texts)
    started = time.monotonic()
    with ExitStack() as stack:
        with stage(f"loading {args.model_path}, ranks: {args.num_gpus}"):
            stack.enter_context(engine)
        loaded = time.monotonic()
        say(engine.plan_summary)
        _encode(args, engine, texts, tokens, output)
        encoded = time.monotonic()
    answer = _summary(args, engine, tokens, output, load_s=loaded - started, encode_s=encoded - loaded)
    print(json.dumps(answer, indent=2) if args.json else _in_words(answer))
    return 0


def _layout(args: argparse.Namespace) -> Layout | None:
    """Return the layout that --tp-size and --dp-size give."""
    if args.tp_size is None and args.dp_size is None:
        return None
    return resolve_layout(args.num_gpus, args.tp_size, args.dp_size)


def _one_input(inputs: list[str]) -> str:
    """Return the one input of texts; the lines of several would have no one number."""
    if len(set(inputs)) > 1:
        raise InputError(f"texts come from one input, {len(inputs)} are given ({', '.join(inputs)}); join them first")
    return inputs[0]


def _make_engine(args: argparse.Namespace, layout: Layout | None) -> Engine:
    from enfold.engine import Engine
    from enfold.worker import EncoderSpec

    spec = EncoderSpec(
        path=args.model_path,
        subfolder=args.subfolder,
        mode=args.encoder_parallel,
        layout=layout,
        dtype=args.dtype,
        numerics=args.numerics,
        timeout_s=args.timeout or TIMEOUT_S,
    )
    return Engine(
        spec,
        num_ranks=args.num_gpus,
        batch_size=args.batch_size,
        max_length=args.max_length,
        threads_per_rank=args.threads_per_rank,
    )


def _tokenize(engine: Engine, texts: list[Text]) -> Tokens:
    tokens = engine.tokenize([text.text for text in texts])
    num_truncated = sum(tokens.truncated)
    if num_truncated:
        first = texts[tokens.truncated.index(True)].line
        say(
            f"{num_truncated} of {len(texts)} texts are longer than {engine.max_length} tokens and are cut off there "
            f"(the first is line {first})"
        )
    return tokens


def _encode(args: argparse.Namespace, engine: Engine, texts: list[Text], tokens: Tokens, output: Path) -> None:
    """Encode all batches; each result goes to its place in the file at once. The first one tells width and dtype."""
    lengths = [len(ids) for ids in tokens.ids]
    firsts = [0, *accumulate(lengths)]
    pooled = args.pooling != "none"
    name = "embeddings" if pooled else "hidden_states"
    with ExitStack() as stack, stage("encoding", len(texts), "texts") as advance:
        file: TensorFile | None = None
        for batch in engine.encode_batches(tokens, args.pooling):
            if file is None:
                file = stack.enter_context(
                    _open_file(args, engine, texts, tokens, output=output, sample=batch.tensors[0])
                )
            for index, tensor in zip(batch.indices, batch.tensors, strict=True):
                rows = tensor.unsqueeze(0) if pooled else tensor
                file.write(name, rows, index if pooled else firsts[index])
            advance(len(batch.indices))


def _open_file(
    args: argparse.Namespace, engine: Engine, texts: list[Text], tokens: Tokens, *, output: Path, sample: torch.Tensor
) -> TensorFile:
    """Return the output file, with the index of the inputs to be written into it."""
    import torch

    from enfold.cli.tensor_file import Slot, TensorFile, as_bytes

    lengths = torch.tensor([len(ids) for ids in tokens.ids])
    index = {
        "line": torch.tensor([text.line for text in texts]),
        "num_tokens": lengths,
        "truncated": torch.tensor(tokens.truncated, dtype=torch.uint8),
        "inputs": as_bytes(text.to_json() for text in texts),
    }
    width = sample.shape[-1]
    if args.pooling == "none":
        index["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        results = {"hidden_states": Slot(sample.dtype, (tokens.num_tokens, width))}
    else:
        results = {"embeddings": Slot(sample.dtype, (len(texts), width))}
    slots = results | {name: Slot(tensor.dtype, tuple(tensor.shape)) for name, tensor in index.items()}
    return TensorFile(output, slots, _metadata(args, engine, tokens), contents=index)


def _metadata(args: argparse.Namespace, engine: Engine, tokens: Tokens) -> dict[str, str]:
    return {
        "enfold": version("enfold"),
        "model": args.model_path,
        "subfolder": args.subfolder or "",
        "pooling": args.pooling,
        "dtype": engine.loaded.dtype,
        "mode": args.encoder_parallel,
        "numerics": args.numerics,
        "plan": json.dumps(engine.loaded.plan),
        "texts": str(len(tokens.ids)),
        "tokens": str(tokens.num_tokens),
        "truncated": str(sum(tokens.truncated)),
        "max_length": str(engine.max_length),
    }


def _summary(
    args: argparse.Namespace, engine: Engine, tokens: Tokens, output: Path, *, load_s: float, encode_s: float
) -> dict[str, Any]:
    return {
        "output": str(output),
        "texts": len(tokens.ids),
        "tokens": tokens.num_tokens,
        "truncated": sum(tokens.truncated),
        "max_length": engine.max_length,
        "pooling": args.pooling,
        "dtype": engine.loaded.dtype,
        "num_ranks": args.num_gpus,
        "load_s": round(load_s, 3),
        "encode_s": round(encode_s, 3),
        "texts_per_s": round(len(tokens.ids) / encode_s, 2),
        "plan": engine.loaded.plan,
        "plan_summary": engine.plan_summary,
    }


def _in_words(answer: dict[str, Any]) -> str:
    cut = f", {answer['truncated']} texts cut off at {answer['max_length']} tokens" if answer["truncated"] else ""
    return (
        f"{answer['texts']} texts, {answer['tokens']} tokens{cut}\n"
        f"load {answer['load_s']:.1f} s, encode {answer['encode_s']:.1f} s, {answer['texts_per_s']:.1f} texts/s\n"
        f"plan: {answer['plan_summary']}\n"
        f"written to {answer['output']}"
    )
