"""The OpenAPI document of the HTTP interface, made from the routes and what they read."""

from collections.abc import Iterable, Mapping
from importlib.metadata import version as installed
from typing import Any

import msgspec
from starlette.routing import BaseRoute

from serving.http.described import Described

ANSWERS = {
    "application/json": {"type": "object"},
    "text/plain": {"type": "string"},
    "application/octet-stream": {"type": "string", "format": "binary"},
}
ERRORS = (400, 401, 404, 405, 408, 409, 413, 415, 422, 429, 431, 499, 500, 503, 504)
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

MESSAGES_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The document of all described routes, as plain values."""
    described = [route for route in routes if isinstance(route, Described)]
    kinds = list({route.body: None for route in described if route.body is not None})
    references, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(kinds, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
        operations = {verb.lower(): _operation(route, schemas) for verb in route.verbs}
        paths.setdefault(route.path_format, {}).update(operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ShiftJAX", "version": installed("shiftjax")},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": ERROR_SCHEMA, "MessagesError": MESSAGES_ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Described, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    path, answers = route.path_format, {route.media_type: {"schema": ANSWERS[route.media_type]}}
    operation: dict[str, Any] = {"summary": route.summary}
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
        answers["text/event-stream"] = {}
    if route.param_convertors:
        fixed = {"in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [{"name": name} | fixed for name in route.param_convertors]
    error = "MessagesError" if path.startswith("/v1/messages") else "Error"
    return operation | {"responses": _responses(answers, error)}


def _responses(answers: dict[str, Any], name: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    failures = {str(status): {"description": "Error", "content": error} for status in ERRORS}
    return {"200": {"description": "OK", "content": answers}, **failures}
