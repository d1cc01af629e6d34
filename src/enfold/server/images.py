"""POST /v1/images/generations, and the pictures behind the URLs that it gives."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from enfold.errors import InputError
from enfold.server.bodies import ERRORS, documented, read_body
from enfold.server.drawing import make_request
from enfold.server.failures import RequestError
from enfold.server.jobs import Done, Job
from enfold.server.schemas import ImagesAnswer, ImagesBody
from enfold.server.shelf import new_id

if TYPE_CHECKING:
    from enfold.diffusion.requests import GenerateRequest
    from enfold.server.service import Service

CACHE = {"Cache-Control": "private, max-age=3600, immutable"}


def routes(service: Service) -> APIRouter:
    """Return the routes of pictures."""
    router = APIRouter(tags=["images"])

    @router.post(
        "/v1/images/generations",
        responses={200: {"model": ImagesAnswer}, **ERRORS},
        openapi_extra=documented(ImagesBody, form=True),
        response_model=None,
    )
    async def draw(request: Request) -> JSONResponse:
        """Draw pictures of a prompt."""
        body = await read_body(request, ImagesBody)
        job = Job("generate", await asyncio.to_thread(_request, service, body))
        done = await service.answer(request, job, body.deadline_s)
        pictures = await asyncio.to_thread(encode_all, done.result.pictures, job.payload, done.result.seeds)
        base = str(request.base_url) if body.response_format == "url" else None
        return JSONResponse(_answer(service, pictures, done, base))

    @router.get(
        "/v1/images/{picture_id}/content",
        responses={200: {"content": {"image/png": {}}}, 404: ERRORS[404]},
        response_class=Response,
    )
    async def fetch(picture_id: str) -> Response:
        """Return a picture that was asked for as a URL, for an hour at most."""
        found = service.pictures.get(picture_id)
        if found is None:
            raise RequestError(404, "no_such_picture", "there is no such picture; they are kept for an hour at most")
        return Response(found.content, media_type=found.media_type, headers=CACHE)

    return router


def _request(service: Service, body: ImagesBody) -> GenerateRequest:
    request = make_request(service, body, num_images=body.n)
    if service.backend.report.is_video:  # type: ignore[attr-defined]
        raise InputError(f"{service.settings.model} draws clips; POST /v1/videos instead")
    return request


def encode_all(pictures: Any, request: Any, seeds: Sequence[int], fps: float = 8.0) -> list[bytes]:
    """Return a PNG or GIF per picture of uint8 [n, frames, H, W, 3], with prompt and seed inside."""
    from enfold.diffusion.pictures import encode_picture

    prompt = request.prompt.replace("\0", "\ufffd")
    return [
        encode_picture(frames, {"prompt": prompt, "seed": seed}, fps)
        for frames, seed in zip(pictures, seeds, strict=True)
    ]


def _answer(service: Service, pictures: Sequence[bytes], done: Done, base: str | None) -> dict[str, Any]:
    if base is None:
        data = [{"b64_json": base64.b64encode(picture).decode()} for picture in pictures]
    else:
        data = [{"url": f"{base}v1/images/{_keep(service, picture)}/content"} for picture in pictures]
    _, _, height, width, _ = done.result.pictures.shape
    return {
        "created": int(time.time()),
        "data": data,
        "output_format": "png",
        "size": f"{width}x{height}",
        "enfold": about(service, done),
    }


def about(service: Service, done: Done) -> dict[str, Any]:
    """Return how pictures came about: the extension field of the answers."""
    return {
        "seeds": list(done.result.seeds),
        "timeline": done.timeline(),
        "texts": {"different": done.result.num_texts, "from_cache": done.result.cached_texts},
        "plan": service.backend.words(),
    }


def _keep(service: Service, picture: bytes) -> str:
    picture_id = new_id("img")
    if not service.pictures.put(picture_id, picture, "image/png"):
        raise RequestError(500, "too_large", f"a picture of {len(picture)} bytes can't be kept; ask for b64_json")
    return picture_id
