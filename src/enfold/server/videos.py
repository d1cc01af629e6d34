"""Clips: POST /v1/videos starts one, and it is asked for, fetched, cancelled and deleted by its id."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from enfold.errors import InputError
from enfold.server.bodies import ERRORS, documented, read_body
from enfold.server.clips import Clips
from enfold.server.drawing import make_request
from enfold.server.failures import RequestError
from enfold.server.schemas import DeletedVideo, Video, VideoList, VideosBody

if TYPE_CHECKING:
    from enfold.diffusion.requests import GenerateRequest
    from enfold.server.service import Service


def routes(service: Service, clips: Clips) -> APIRouter:
    """Return the routes of clips."""
    router = APIRouter(tags=["videos"], prefix="/v1/videos")

    @router.post("", responses=ERRORS, openapi_extra=documented(VideosBody, form=True))
    async def start(request: Request) -> Video:
        """Start to draw a clip; its status says when it can be fetched."""
        body = await read_body(request, VideosBody)
        wanted = await asyncio.to_thread(_request, service, body)
        return await asyncio.to_thread(clips.start, wanted, body.fps, body.deadline_s)

    @router.get("", responses=ERRORS)
    async def index(
        limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None, order: str = "desc"
    ) -> VideoList:
        """List clips, newest first (order=asc: oldest first), from after the clip `after`."""
        if order not in ("asc", "desc"):
            raise RequestError(400, "invalid_request", f"order={order}: use asc or desc", "order")
        return clips.index(limit, after, newest_first=order == "desc")

    @router.get("/{video_id}", responses=ERRORS)
    async def status(video_id: str) -> Video:
        """Say how far a clip is."""
        return clips.status(video_id)

    @router.get(
        "/{video_id}/content", responses={200: {"content": {"image/gif": {}}}, **ERRORS}, response_class=Response
    )
    async def content(video_id: str) -> Response:
        """Return a finished clip."""
        found = clips.content(video_id)
        return Response(found.content, media_type=found.media_type)

    @router.post("/{video_id}/cancel", responses=ERRORS)
    async def cancel(video_id: str) -> Video:
        """Give up a clip. One that the ranks draw already is drawn to its end and thrown away."""
        return clips.cancel(video_id)

    @router.delete("/{video_id}", responses=ERRORS)
    async def delete(video_id: str) -> DeletedVideo:
        """Cancel a clip if need be, and forget it."""
        clips.delete(video_id)
        return DeletedVideo(id=video_id)

    return router


def _request(service: Service, body: VideosBody) -> GenerateRequest:
    num_frames = body.num_frames
    if num_frames is None and body.seconds is not None:
        num_frames = max(1, round(body.seconds * body.fps))
    request = make_request(service, body, num_frames=num_frames)
    if not service.backend.report.is_video:  # type: ignore[attr-defined]
        raise InputError(f"{service.settings.model} draws pictures; POST /v1/images/generations instead")
    return request
