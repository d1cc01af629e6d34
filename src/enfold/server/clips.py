"""The clips of a server: what was asked for, how far it is, and what came of it."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enfold.batching import Ticket
from enfold.server.failures import RequestError, printable, to_request_error
from enfold.server.images import about, encode_all
from enfold.server.jobs import Done, Job
from enfold.server.schemas import Video, VideoList
from enfold.server.shelf import Content, new_id

if TYPE_CHECKING:
    from enfold.diffusion.requests import GenerateRequest, Progress
    from enfold.server.service import Service

logger = logging.getLogger(__name__)

MOST_CLIPS = 512
"""Finished clips beyond this are forgotten, oldest first; those at work are bounded by the queue."""

SHARES = {"encode": (0, 5), "denoise": (5, 95), "decode": (95, 100)}
"""What of a clip's progress, in per cent, each stage is."""


@dataclass(eq=False)
class Clip:
    """One clip. `state` is the status of the API."""

    key: str
    request: GenerateRequest
    fps: float
    created_at: int
    ticket: Ticket[Job, Done] | None = None
    state: str = "queued"
    progress: int = 0
    completed_at: int | None = None
    error: dict[str, str] | None = None
    about: dict[str, Any] | None = None
    size: tuple[int | None, int | None] = (None, None)
    num_frames: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def at_work(self) -> bool:
        """Whether the clip may still come."""
        return self.state in ("queued", "in_progress")

    def move_to(self, state: str, error: dict[str, str] | None = None) -> bool:
        """Change the state, unless it is final already; return whether it was changed."""
        with self.lock:
            if not self.at_work:
                return False
            self.state, self.error = state, error
            self.completed_at = None if self.at_work else int(time.time())
            return True


class Clips:
    """Clips by id. Callbacks of the replicas' threads move them on; any thread may ask."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._clips: OrderedDict[str, Clip] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, request: GenerateRequest, fps: float, deadline_s: float | None) -> Video:
        """Queue a clip; raises what Service.submit raises."""
        defaults = self.service.backend.report.defaults  # type: ignore[attr-defined]
        clip = Clip(new_id("video"), request, fps, int(time.time()))
        clip.size = (request.width or defaults.get("width"), request.height or defaults.get("height"))
        clip.num_frames = request.num_frames or defaults.get("num_frames")
        job = Job("generate", request, lambda: self._started(clip), lambda note: self._moved(clip, note))
        clip.ticket = self.service.submit(job, deadline_s)
        with self._lock:
            self._clips[clip.key] = clip
            self._forget_old()
        clip.ticket.future.add_done_callback(lambda future: self._finished(clip, future))
        return self._describe(clip)

    def status(self, key: str) -> Video:
        """Return a clip; 404 where there is none."""
        return self._describe(self._find(key))

    def index(self, limit: int, after: str | None, newest_first: bool) -> VideoList:
        """Return up to `limit` clips, from after the one named `after`."""
        with self._lock:
            clips = list(self._clips.values())
        clips = clips[::-1] if newest_first else clips
        if after is not None:
            self._find(after)
            clips = clips[[clip.key for clip in clips].index(after) + 1 :]
        videos = [self._describe(clip) for clip in clips[:limit]]
        first, last = (videos[0].id, videos[-1].id) if videos else (None, None)
        return VideoList(data=videos, has_more=len(clips) > limit, first_id=first, last_id=last)

    def content(self, key: str) -> Content:
        """Return a finished clip; 404 where it is not there, with what it is instead."""
        clip = self._find(key)
        found = self.service.clips.get(key)
        if clip.state != "completed" or found is None:
            state = "expired" if clip.state == "completed" else clip.state
            told = f"the clip is {state} and has no content; GET /v1/videos/{key} says more"
            raise RequestError(404, "not_there", told)
        return found

    def cancel(self, key: str) -> Video:
        """Give up a clip; what is finished stays as it is."""
        clip = self._find(key)
        clip.move_to("cancelled")
        if clip.ticket is not None:
            clip.ticket.future.cancel()
        return self._describe(clip)

    def delete(self, key: str) -> None:
        """Cancel and forget a clip."""
        self.cancel(key)
        with self._lock:
            self._clips.pop(key, None)
        self.service.clips.drop(key)

    def _find(self, key: str) -> Clip:
        with self._lock:
            clip = self._clips.get(key)
        if clip is None:
            raise RequestError(404, "no_such_video", "there is no such clip; it may have been deleted", "video_id")
        return clip

    def _forget_old(self) -> None:
        finished = [key for key, clip in self._clips.items() if not clip.at_work]
        for key in finished[: max(0, len(self._clips) - MOST_CLIPS)]:
            del self._clips[key]

    def _describe(self, clip: Clip) -> Video:
        kept = self.service.clips.kept_s
        width, height = clip.size
        seconds = (clip.num_frames or 0) / clip.fps
        return Video(
            id=clip.key,
            model=self.service.settings.model,
            status=clip.state,  # type: ignore[arg-type]
            progress=100 if clip.state == "completed" else clip.progress,
            created_at=clip.created_at,
            completed_at=clip.completed_at,
            expires_at=None if clip.completed_at is None else clip.completed_at + int(kept),
            prompt=clip.request.prompt,
            seconds=f"{seconds:g}",
            size=f"{width}x{height}" if width and height else "auto",
            error=clip.error,
            enfold=clip.about,
        )

    # From the replicas' threads.

    def _started(self, clip: Clip) -> None:
        clip.move_to("in_progress")

    def _moved(self, clip: Clip, note: Progress) -> None:
        begin, end = SHARES.get(note.stage, (0, 100))
        clip.progress = max(clip.progress, min(99, begin + (end - begin) * note.step // max(1, note.total)))

    def _finished(self, clip: Clip, future: Future[Done]) -> None:
        if future.cancelled():
            clip.move_to("cancelled")
            return
        try:
            self._keep(clip, future.result())
        except Exception as error:
            told = to_request_error(error)
            if told.status >= 500:
                logger.warning("clip %s: %s: %s", clip.key, type(error).__name__, error)
            self.service.metrics.errors.labels(type(error).__name__).inc()
            clip.move_to("failed", {"code": told.code, "message": printable(told.message)})

    def _keep(self, clip: Clip, done: Done) -> None:
        if not clip.at_work:
            return
        frames = done.result.pictures[:1]
        _, num_frames, height, width, _ = frames.shape
        (content,) = encode_all(frames, clip.request, done.result.seeds[:1], clip.fps)
        if not self.service.clips.put(clip.key, content, "image/png" if num_frames == 1 else "image/gif"):
            raise RequestError(500, "too_large", f"a clip of {len(content)} bytes can't be kept")
        clip.size, clip.num_frames, clip.about = (width, height), num_frames, about(self.service, done)
        if not clip.move_to("completed"):
            self.service.clips.drop(clip.key)
