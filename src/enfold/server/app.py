"""The HTTP application over a service: routes, gates before them, and one shape for all errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.requests import Request

from enfold.server import embeddings, failures, health, images, videos
from enfold.server.clips import Clips
from enfold.server.gates import BodyGate, Counted, KeyGate

if TYPE_CHECKING:
    from enfold.server.service import Service

TICK_S = 0.5
"""How often late requests are dropped, even where no replica takes any."""


def make_app(service: Service) -> FastAPI:
    """Return the application. It neither starts nor ends the service."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ticker = asyncio.create_task(_tick(service))
        yield
        ticker.cancel()

    app = FastAPI(
        title="enfold serve",
        version=version("enfold"),
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    for router in (
        images.routes(service),
        videos.routes(service, Clips(service)),
        embeddings.routes(service),
        health.routes(service),
    ):
        app.include_router(router)
    failures.install(app)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_middleware(BodyGate, limits=service.limits)
    app.add_middleware(KeyGate, api_key=service.settings.api_key)
    app.add_middleware(Counted, metrics=service.metrics)
    _document(app, service)
    return app


async def _on_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return failures.answer(failures.validation_error(error.errors()))


async def _tick(service: Service) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        service.queue.drop_late()


def _document(app: FastAPI, service: Service) -> None:
    """Make the OpenAPI document say what is true: wrong values are answered with 400, and keys may be needed."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for route in document["paths"].values():
            for operation in route.values():
                operation["responses"].pop("422", None)
        if service.settings.api_key is not None:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
