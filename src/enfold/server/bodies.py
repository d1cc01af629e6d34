"""Read a request's body, JSON or a form, into its schema; and what the OpenAPI document says of it."""

from __future__ import annotations

import base64
import json
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from enfold.server.failures import RequestError, validation_error
from enfold.server.schemas import Body, ErrorAnswer

BodyT = TypeVar("BodyT", bound=Body)
FORM = "multipart/form-data"
MAX_FIELDS = 32

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer, "description": text}
    for code, text in {
        400: "a value that can't be used",
        401: "no key, or not the right one",
        404: "no such thing",
        405: "not this method",
        408: "the body did not come, or the deadline passed",
        413: "the body is too large",
        415: "neither JSON nor a form",
        429: "the queue is full",
        500: "the ranks failed",
        503: "not ready",
    }.items()
}


async def read_body(request: Request, schema: type[BodyT]) -> BodyT:
    """Return the body as `schema`; raise RequestError 400 with the field at fault, or 415.

    A form may hold files where the schema has text (prompt_embeds): they are taken as base64.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == FORM:
        fields: Any = await _form(request)
    elif kind == "application/json":
        fields = _json(await request.body())
    else:
        raise RequestError(415, "unsupported_media_type", f"Content-Type {kind or '(none)'}: send application/json")
    try:
        # What comes in a form is text: "2" is a number there, and not in JSON.
        return schema.model_validate(fields, strict=kind != FORM)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False)) from None


def _json(content: bytes) -> Any:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "invalid_json", f"the body is no JSON: {error}") from None
    if b"\\ud" in content.lower():
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            told = "the body holds half of a surrogate pair (\\ud800 to \\udfff); send whole characters"
            raise RequestError(400, "invalid_json", told) from None
    if not isinstance(fields, dict):
        raise RequestError(400, "invalid_json", f"the body holds a {type(fields).__name__}; send an object")
    return fields


async def _form(request: Request) -> dict[str, Any]:
    """Return the fields of a form. The size of its parts is bounded by that of the body, which was counted before."""
    fields: dict[str, Any] = {}
    try:
        async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=2**30) as form:
            for name, value in form.multi_items():
                if name in fields:
                    raise RequestError(400, "invalid_form", f"{name} stands in the form twice; leave one out", name)
                fields[name] = base64.b64encode(await value.read()).decode() if isinstance(value, UploadFile) else value
    except HTTPException as error:  # a malformed form
        raise RequestError(400, "invalid_form", f"the body is no form: {error.detail}") from None
    return fields


def documented(schema: type[Body], *, form: bool = False) -> dict[str, Any]:
    """Return the requestBody of a route for the OpenAPI document."""
    described = {"schema": schema.model_json_schema()}
    kinds = ["application/json", FORM] if form else ["application/json"]
    return {"requestBody": {"required": True, "content": dict.fromkeys(kinds, described)}}
