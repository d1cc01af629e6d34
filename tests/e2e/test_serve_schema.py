"""Requests made up from the OpenAPI document: whatever comes, the answer is no 5xx and is what the document says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fake_backend import FakeBackend, Live, serving
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from enfold.server.app import make_app
from enfold.server.limits import Limits
from enfold.server.service import Service, Settings

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SETTINGS = {"limits": Limits(request_s=5.0), "batching_max_size": 4}


def document_of(backend: FakeBackend) -> Any:
    app = make_app(Service(lambda: backend, Settings("fake", "diffusion", **SETTINGS)))
    return app.openapi()


schema = schemathesis.openapi.from_dict(document_of(FakeBackend()))


@pytest.fixture(scope="module", params=["pictures", "clips"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    with serving(FakeBackend(is_video=request.param == "clips", draw_s=0.0), **SETTINGS) as server:
        yield server


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_nothing_that_is_sent_breaks_the_server(case: Any, live: Live) -> None:
    response = case.call(base_url=live.url)
    case.validate_response(response, checks=CHECKS)
    assert live.service.ready and live.backend.restarts == 0


def test_the_document_names_every_route() -> None:
    document = document_of(FakeBackend())
    assert set(document["paths"]) == {
        "/encode",
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/v1/embeddings",
        "/v1/images/generations",
        "/v1/images/{picture_id}/content",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/videos",
        "/v1/videos/{video_id}",
        "/v1/videos/{video_id}/cancel",
        "/v1/videos/{video_id}/content",
    }
