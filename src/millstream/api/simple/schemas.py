"""What `/chat` and `/generate` take, in a body or in the query of an EventSource."""

from pydantic import Field

from millstream.api.openai.schemas import FreeForm, ModelName, Sampling


class SimpleBody(FreeForm):
    """`POST /chat`, `POST /generate` and `POST /generate/stream`."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None


class SimpleQuery(Sampling):
    """`GET /chat` and `GET /generate/stream`: an EventSource has nothing but its URL."""

    model: ModelName | None = None
    prompt: str = Field(min_length=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    idempotency_key: str | None = None
