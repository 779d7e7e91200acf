"""How request bodies appear in `/openapi.json`: routes read them themselves, strictly."""

import pkgutil
from typing import Any, cast

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra` for a JSON body; `describe` writes it out when it is asked for."""
    return {"requestBody": _named(schema)}


def query_parameters(schema: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra` for parameters in its query; written out likewise."""
    return {"parameters": [_named(schema)]}


def _named(schema: type[BaseModel]) -> dict[str, str]:
    """Where it is: writing it out is for those who ask, not for the start of every pod."""
    return {"$ref": f"{schema.__module__}:{schema.__qualname__}"}


def _write_out(operation: dict[str, Any]) -> None:
    """Put schemas in the place of their names."""
    if "$ref" in operation.get("requestBody", {}):
        schema = _inlined(operation["requestBody"]["$ref"])
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    for named in [item for item in operation.get("parameters", ()) if "$ref" in item]:
        schema = _inlined(named["$ref"])
        operation["parameters"].remove(named)
        operation["parameters"] += [
            {"name": name, "in": "query", "required": name in schema.get("required", ()),
             "schema": field}
            for name, field in schema["properties"].items()
        ]  # fmt: skip


def _inlined(name: str) -> dict[str, Any]:
    """The JSON schema of a model by its name, in one piece."""
    schema: type[BaseModel] = pkgutil.resolve_name(name)
    whole = schema.model_json_schema()
    definitions: dict[str, Any] = whole.pop("$defs", {})
    return _inline(whole, definitions)


def _inline(part: Any, definitions: dict[str, Any]) -> Any:
    """Put each definition in the place of its references; none of ours refers to itself."""
    if isinstance(part, dict):
        fields = cast("dict[str, Any]", part)
        if "$ref" in fields:
            return _inline(definitions[fields["$ref"].rpartition("/")[2]], definitions)
        return {name: _inline(value, definitions) for name, value in fields.items()}
    if isinstance(part, list):
        return [_inline(value, definitions) for value in cast("list[Any]", part)]
    return part


_ERRORS = {
    "400": "A value is not as it must be.",
    "401": "No key, or a wrong one.",
    "403": "Not for this caller.",
    "404": "No such task or model.",
    "409": "The `Idempotency-Key` stands for another request, or the task was stopped.",
    "410": "It was there, and has expired.",
    "413": "The body is too large.",
    "429": "The caller has used what it may.",
    "500": "The task was accepted and failed.",
    "503": "The fleet cannot take it now.",
}
_OF_BODIES = {"409", "413", "500"}
_OF_TASKS = {"404", "410", "429"}
_ERROR = {
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


def _say_what_fails(path: str, operation: dict[str, Any]) -> None:
    """Name the errors of an operation: those of every one, of tasks, and of bodies."""
    if path in ("/health", "/metrics"):
        return
    named = set(_ERRORS)
    if "requestBody" not in operation:
        named -= _OF_BODIES
        names_model = any(item["name"] == "model" for item in operation.get("parameters", ()))
        if "{" not in path and not names_model:
            named -= _OF_TASKS
    for status in sorted(named):
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        operation["responses"][status] = {"description": _ERRORS[status], "content": content}


def describe(app: FastAPI) -> None:
    """Give the application its `/openapi.json`: without FastAPI's 422, which no route answers."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            for path, methods in schema["paths"].items():
                for operation in methods.values():
                    _write_out(operation)
                    operation["responses"].pop("422", None)
                    _say_what_fails(path, operation)
            schema.setdefault("components", {}).setdefault("schemas", {})["Error"] = _ERROR
            # `{}`: a fleet may have been set up without keys.
            schema["security"] = [{"key": []}, {}]
            schema.setdefault("components", {})["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer", "description": "A key, or a JWT."}
            }
            for unused in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(unused, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi
