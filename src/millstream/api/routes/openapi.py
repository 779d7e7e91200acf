"""How request bodies appear in `/openapi.json`: routes read them themselves, strictly."""

from typing import Any

from pydantic import BaseModel


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra` for a JSON body."""
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": schema.model_json_schema(ref_template="#/components/schemas/{model}")
                    | {"title": schema.__name__}
                }
            },
        }
    }
