"""What operators and the page ask: health, metrics, the model; and the page itself."""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from enfold.server.bodies import ERRORS
from enfold.server.failures import RequestError
from enfold.server.schemas import Health, Model, ModelList

if TYPE_CHECKING:
    from enfold.server.service import Service

PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes(service: Service) -> APIRouter:
    """Return the routes for operators and those of the page."""
    router = APIRouter(tags=["server"])

    @router.get("/health", responses={200: {"model": Health}, 503: {"model": Health}}, response_model=None)
    async def health() -> JSONResponse:
        """Return the state of each rank; 200 where a request could be run now, else 503."""
        state = service.health()
        return JSONResponse(state, 200 if state["ready"] else 503)

    @router.get("/health/live")
    async def live() -> dict[str, bool]:
        """Return 200 as long as the process runs."""
        return {"live": True}

    @router.get("/health/ready", responses={503: {}}, response_model=None)
    async def ready() -> JSONResponse:
        """Return 200 where a request could be run now, else 503."""
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, 401: ERRORS[401]})
    async def metrics() -> Response:
        """Return figures in Prometheus' text format."""
        return Response(service.metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> ModelList:
        """Return the one model that is served."""
        return ModelList(data=[describe(service)])

    @router.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def model(model: str) -> Model:
        """Return the model that is served, if it is this one."""
        if model != service.settings.model:
            told = f"model {model!r} is not served here; it is {service.settings.model!r}"
            raise RequestError(404, "model_not_found", told, "model")
        return describe(service)

    for path, (name, kind) in PAGE.items():
        router.add_api_route(path, _file(name, kind), include_in_schema=False, methods=["GET"])
    return router


def _file(name: str, kind: str) -> Any:
    content = files("enfold.server").joinpath(name).read_bytes()

    async def page() -> Response:
        return Response(content, media_type=kind, headers=PAGE_HEADERS)

    return page


def describe(service: Service) -> Model:
    """Return the model with its defaults, limits and plans as far as they are known."""
    about: dict[str, Any] = {"type": service.settings.model_type, "limits": asdict(service.limits)}
    about["batching_max_size"] = service.settings.batching_max_size
    if service.loaded:
        about["plans"], about["words"] = service.backend.plans(), service.backend.words()
        report = getattr(service.backend, "report", None)
        if report is not None:
            about |= {"pipeline": report.pipeline_class, "is_video": report.is_video, "defaults": report.defaults}
            about |= {"accepts": list(report.accepts), "multiple": report.multiple}
    return Model(id=service.settings.model, created=service.started_at, enfold=about)
