"""From errors to HTTP answers: one JSON shape, that of OpenAI, and one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from enfold.errors import (
    ConfigError,
    DeadlineError,
    EncodeError,
    InputError,
    LayoutError,
    LostRankError,
    QueueClosedError,
    QueueFullError,
)


@dataclass
class RequestError(Exception):
    """An answer of the server that is no 2xx. `param`: the field at fault."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


STATUS: dict[type[Exception], tuple[int, str, float | None]] = {
    QueueFullError: (429, "queue_full", 1.0),
    QueueClosedError: (503, "shutting_down", 10.0),
    DeadlineError: (408, "deadline_exceeded", None),
    LostRankError: (503, "ranks_lost", 5.0),
    InputError: (400, "invalid_input", None),
    ConfigError: (400, "unsupported", None),
    LayoutError: (400, "unsupported", None),
    EncodeError: (500, "failed_on_ranks", None),
}
"""Status, code, and seconds after which to try again, by class; the first that fits (subclasses before their bases)."""

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's `type` by status; the others are invalid_request_error below 500 and server_error from there on."""


def to_request_error(error: BaseException) -> RequestError:
    """Return the answer for any error; of one that is not enfold's own, nothing but its class is told."""
    if isinstance(error, RequestError):
        return error
    for kind, (status, code, retry_after_s) in STATUS.items():
        if isinstance(error, kind):
            return RequestError(status, code, str(error), retry_after_s=retry_after_s)
    return RequestError(500, "internal_error", f"the server failed with {type(error).__name__}; its log says more")


def answer(error: RequestError) -> JSONResponse:
    """Return the JSON answer: {"error": {"message", "type", "param", "code"}}."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    body = {"message": printable(error.message), "type": kind, "param": error.param, "code": error.code}
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": body}, error.status, headers)


def printable(text: str) -> str:
    """Return text that can be sent as UTF-8: JSON may hold half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


def install(app: FastAPI) -> None:
    """Make the app answer every error in the one shape."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return answer(to_request_error(error))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {404: "no_such_route", 405: "method_not_allowed"}.get(error.status_code, "refused")
        response = answer(RequestError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}"))
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(RequestError, on_error)
    app.add_exception_handler(HTTPException, on_http)
    for kind in STATUS:
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(Exception, on_error)


def validation_error(found: Sequence[Any]) -> RequestError:
    """Return the answer for what pydantic has refused, given its errors(); it names the first field at fault."""
    first = found[0]
    param = ".".join(map(str, first["loc"])) or None
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    message = f"{param or 'the body'}: {first['msg']}{more}"
    if first["type"] == "extra_forbidden":
        message = f"{param}: this server knows no such field; leave it out{more}"
    return RequestError(400, "invalid_request", message, None if param is None else printable(param))
