"""What every request passes before its route: its time is taken, its key compared, its body counted."""

from __future__ import annotations

import asyncio
import hmac
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enfold.server.failures import RequestError, answer
from enfold.server.limits import Limits
from enfold.server.metrics import Metrics

OPEN = ("/", "/page.css", "/page.js", "/health", "/health/live", "/health/ready")
"""Paths that need no key: the page itself, and what a load balancer asks."""


def is_open(path: str) -> bool:
    """Return whether a path needs no key. A picture's id can't be guessed: who has its URL may see it."""
    return path in OPEN or (path.startswith("/v1/images/") and path.endswith("/content"))


class Counted:
    """Counts requests by route, method and status, and takes their time."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note how it was answered."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.monotonic(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")  # never the path: ids would make endless labels
            self.metrics.request_done(route, scope["method"], status, time.monotonic() - began)


class KeyGate:
    """Refuses requests without the key, in `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app, self.expected = app, None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and self.expected is not None and not is_open(scope["path"]):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                told = "a key is needed in the header `Authorization: Bearer KEY`, and it must be that of --api-key"
                return await answer(RequestError(401, "invalid_api_key", told))(scope, receive, send)
        return await self.app(scope, receive, send)


class BodyGate:
    """Counts the bytes of a body as they come, and refuses what is too large or too slow."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a body that is bounded, or answer 413 or 408."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.limits.body_bytes:
            return await answer(self._too_large(int(announced)))(scope, receive, send)
        seen, whole = 0, False

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:  # what comes now is the end of the connection, and may take as long as it wants
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self.limits.body_s)
            except TimeoutError:
                told = f"no more of the body came for {self.limits.body_s:g} s"
                raise RequestError(408, "body_timeout", told) from None
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > self.limits.body_bytes:
                raise self._too_large(seen)
            return message

        return await self.app(scope, counted, send)

    def _too_large(self, num_bytes: int) -> RequestError:
        most = self.limits.body_bytes
        told = f"the body has {num_bytes} bytes or more, and this server takes {most} (--max-body-mib)"
        return RequestError(413, "body_too_large", told)
