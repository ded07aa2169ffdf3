"""The OpenAPI document of the HTTP interface, made from the types that requests are read with."""

from importlib.metadata import version as installed
from typing import Any

import msgspec

from serving.http.info import INFO
from serving.server.dialects.messages import MessagesCountFields, MessagesFields
from serving.server.dialects.responses_api import ResponsesCountFields, ResponsesFields
from serving.server.embedding import EmbeddingFields, RerankFields
from serving.server.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields

BODIES = {
    "/v1/completions": (CompletionFields, "Continue prompts"),
    "/v1/chat/completions": (ChatFields, "Answer a conversation"),
    "/v1/messages": (MessagesFields, "Answer a conversation (Anthropic's Messages)"),
    "/v1/messages/count_tokens": (MessagesCountFields, "Count the tokens of a message"),
    "/v1/responses": (ResponsesFields, "Answer a conversation (OpenAI's Responses)"),
    "/v1/responses/input_tokens": (ResponsesCountFields, "Count the tokens of an input"),
    "/v1/embeddings": (EmbeddingFields, "Embed texts"),
    "/v1/rerank": (RerankFields, "Order documents by their likeness to a query"),
    "/tokenize": (TokenizeFields, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeFields, "The text of token ids"),
}
READS = {
    "/v1/models": "The models that are served",
    "/v1/models/{id}": "One model",
    "/health/live": "The process runs",
    "/health/ready": "Requests are taken",
    "/health/progress": "Steps finish, if there is work",
    "/version": "The version of the server",
    **INFO,
    "/ping": "Requests are taken",
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


def document() -> dict[str, Any]:
    """The document as plain values."""
    kinds = [kind for kind, _ in BODIES.values()]
    references, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    schemas = zip(BODIES.items(), references, strict=True)
    paths = {path: {"post": _post(path, text, schema)} for (path, (_, text)), schema in schemas}
    paths |= {path: {"get": _get(path, text)} for path, text in READS.items()}
    paths["/ping"]["post"] = paths["/ping"]["get"]
    paths["/metrics"] = {"get": {"summary": "Prometheus metrics", "responses": _text_responses()}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ShiftJAX", "version": installed("shiftjax")},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": ERROR_SCHEMA, "MessagesError": MESSAGES_ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(path: str, summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    body = {"required": True, "content": content}
    answers = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    error = "MessagesError" if path.startswith("/v1/messages") else "Error"
    return {"summary": summary, "requestBody": body, "responses": _responses(answers, error)}


def _get(path: str, summary: str) -> dict[str, Any]:
    answers = {"application/json": {"schema": {"type": "object"}}}
    operation = {"summary": summary, "responses": _responses(answers)}
    if "{id}" in path:
        place = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [place]
    return operation


def _responses(answers: dict[str, Any], name: str = "Error") -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    failures = {str(status): {"description": "Error", "content": error} for status in ERRORS}
    return {"200": {"description": "OK", "content": answers}, **failures}


def _text_responses() -> dict[str, Any]:
    return _responses({"text/plain": {"schema": {"type": "string"}}})
