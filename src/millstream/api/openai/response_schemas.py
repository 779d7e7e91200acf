"""The body of `POST /v1/responses`, and the queries of what it makes, as this server takes them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
)

from millstream.api.openai.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    Body,
    ModelName,
    NoItems,
    Nothing,
    Sampling,
    StreamOptions,
    only,
)

ResponseId = Annotated[str, Field(min_length=1, max_length=200)]
Label = Annotated[str, Field(max_length=512)]
# What these would add is never there; log probabilities would be, and cannot be had yet.
Includable = Literal[
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "file_search_call.results",
    "reasoning.encrypted_content",
]


class InputPart(Body):
    """A part of an item's content: text, as asked or as answered before."""

    type: Literal["input_text", "output_text"]
    text: str
    # As answers have them; there is nothing in them yet.
    annotations: list[Any] | None = Field(default=None, max_length=0)
    logprobs: list[Any] | None = Field(default=None, max_length=0)


class InputItem(Body):
    """A message: a new one, or one of an earlier answer's output, given back as it came."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)]
    id: str | None = Field(default=None, max_length=200)
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: ResponseId


def _kind_of(item: object) -> str:
    """Which of the two an item is to be: all that is no reference is judged as a message."""
    if isinstance(item, dict):
        kind: object = cast("dict[str, Any]", item).get("type")
        return "reference" if kind == "item_reference" else "message"
    return "reference" if isinstance(item, ItemReference) else "message"


AnyItem = Annotated[
    Annotated[InputItem, Tag("message")] | Annotated[ItemReference, Tag("reference")],
    Discriminator(_kind_of),
]


class TextFormat(Body):
    """The form of the text: free."""

    type: Literal["text"]


class TextOptions(Body):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Nothing = None


class ResponseRequest(Sampling):
    """`POST /v1/responses`."""

    model: ModelName | None = None
    input: (
        str | Annotated[list[AnyItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    )
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Label] | None = Field(
        default=None, max_length=16
    )
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Includable] | None = Field(default=None, max_length=16)
    service_tier: Label | None = None
    # Only what comes to nothing:
    tools: NoItems = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    top_logprobs: Annotated[int | None, only(0)] = None
    reasoning: dict[str, Any] | None = None
    conversation: Nothing = None
    prompt: Nothing = None
    # No effect on the answer:
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None

    @field_validator("reasoning")
    @classmethod
    def _no_reasoning(cls, value: Mapping[str, object] | None) -> Mapping[str, object] | None:
        if value and any(option is not None for option in value.values()):
            raise ValueError("not supported yet; leave it out")
        return value


class Query(BaseModel):
    """The base of queries: their values are text, and names that are not known do no harm."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class RetrieveQuery(Query):
    """`GET /v1/responses/{response_id}`."""

    stream: bool = False
    starting_after: Annotated[str, WithJsonSchema({"type": "integer", "minimum": 0})] | None = None


class InputItemsQuery(Query):
    """`GET /v1/responses/{response_id}/input_items`."""

    limit: int = Field(default=20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: ResponseId | None = None
