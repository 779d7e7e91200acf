"""How request bodies appear in `/openapi.json`: routes read them themselves, strictly."""

from typing import Any, cast

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra` for a JSON body."""
    whole = schema.model_json_schema()
    definitions: dict[str, Any] = whole.pop("$defs", {})
    content = {"application/json": {"schema": _inline(whole, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


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
            for methods in schema["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(unused, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi
