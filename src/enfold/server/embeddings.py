"""POST /v1/embeddings and POST /encode: what encoders make of texts, as vectors or as the whole conditioning set."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from enfold.errors import InputError
from enfold.server.bodies import ERRORS, documented, read_body
from enfold.server.drawing import check_model
from enfold.server.jobs import Done, EmbedRequest, EncodeRequest, Job
from enfold.server.limits import check_at_most, check_text
from enfold.server.schemas import EmbeddingsAnswer, EmbeddingsBody, EncodeBody

if TYPE_CHECKING:
    from enfold.server.service import Service

SAFETENSORS = "application/vnd.safetensors"


def routes(service: Service) -> APIRouter:
    """Return the routes of encoders."""
    router = APIRouter(tags=["encoders"])

    @router.post(
        "/v1/embeddings",
        responses={200: {"model": EmbeddingsAnswer}, **ERRORS},
        openapi_extra=documented(EmbeddingsBody),
        response_model=None,
    )
    async def embed(request: Request) -> JSONResponse:
        """Return one vector per text."""
        body = await read_body(request, EmbeddingsBody)
        wanted = await asyncio.to_thread(_tokens, service, body)
        done = await service.answer(request, Job("embed", wanted), body.deadline_s)
        return JSONResponse(await asyncio.to_thread(_vectors, service, body, wanted, done))

    @router.post(
        "/encode",
        responses={200: {"content": {SAFETENSORS: {}}}, **ERRORS},
        openapi_extra=documented(EncodeBody),
        response_class=Response,
    )
    async def encode(request: Request) -> Response:
        """Return all that the encoders make of texts, as one safetensors file: tensor `0.name` is that of text 0.

        Of a pipeline: the arguments of its DiT (prompt_embeds, ...) and, by encoder, masks, pooled vectors and the
        hidden states of chosen layers. Such a file can be given to POST /v1/images/generations as prompt_embeds.
        """
        body = await read_body(request, EncodeBody)
        texts = [body.input] if isinstance(body.input, str) else body.input
        _check_inputs(service, body.model, texts)
        check_at_most(service.limits, "tokens", body.max_sequence_length, "max_sequence_length")
        job = Job("encode", EncodeRequest(tuple(texts), body.max_sequence_length, tuple(body.layers)))
        done = await service.answer(request, job, body.deadline_s)
        return Response(await asyncio.to_thread(_file, service, done), media_type=SAFETENSORS)

    return router


def _file(service: Service, done: Done) -> bytes:
    from enfold.server.tensors import pack

    return pack(done.result, service.settings.model)


def _check_inputs(service: Service, model: str | None, texts: Sequence[Any]) -> None:
    check_model(service, model)
    check_at_most(service.limits, "inputs", len(texts), "input", "the number of inputs")
    for place, text in enumerate(texts):
        if isinstance(text, str):
            check_text(service.limits, text, f"input.{place}")


def _tokens(service: Service, body: EmbeddingsBody) -> EmbedRequest:
    """Return the texts of a request as token ids."""
    inputs: list[Any] = [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else [*body.input]
    _check_inputs(service, body.model, inputs)
    backend: Any = service.backend
    pooling: Any = body.pooling or service.settings.pooling
    if backend.kind != "encoder":
        raise InputError(
            f"{service.settings.model} is a diffusion pipeline: it has no single vector per text; POST /encode gives "
            "what its encoders make of one"
        )
    _check_dimensions(body.dimensions, backend.hidden_size)
    if not isinstance(inputs[0], str):
        return EmbedRequest(tuple(map(tuple, inputs)), pooling)
    tokens = backend.tokenize(inputs)
    if any(tokens.truncated) and not body.truncate:
        place = tokens.truncated.index(True)
        raise InputError(f"input {place} has more than the {backend.max_length} tokens of this model; set truncate")
    return EmbedRequest(tuple(map(tuple, tokens.ids)), pooling)


def _check_dimensions(wanted: int | None, there: int) -> None:
    if wanted not in (None, there):
        raise InputError(f"dimensions={wanted}: the vectors of this model have {there}; leave it out")


def _vectors(service: Service, body: EmbeddingsBody, wanted: EmbedRequest, done: Done) -> dict[str, Any]:
    import torch

    rows = torch.stack(done.result).float()
    if body.normalize:
        rows = torch.nn.functional.normalize(rows, dim=-1)
    array = rows.numpy().astype("<f4")
    vectors: list[Any] = (
        array.tolist()
        if body.encoding_format == "float"
        else [base64.b64encode(row.tobytes()).decode() for row in array]
    )
    num_tokens = sum(map(len, wanted.ids))
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": place, "embedding": vector} for place, vector in enumerate(vectors)],
        "model": service.settings.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "enfold": {"timeline": done.timeline(), "plan": service.backend.words()},
    }
