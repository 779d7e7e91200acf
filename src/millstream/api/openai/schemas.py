"""OpenAI's request bodies as this server takes them.

A field that is not here, or holds what the fleet cannot do, gets a 400 that names it; nothing is
ignored in silence but what has no effect on the answer.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from millstream.shared.errors import InvalidRequest
from millstream.shared.schemas import to_json

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
ModelName = Annotated[str, Field(min_length=1, max_length=200)]
MAX_MESSAGES = 10_000
MAX_STOPS = 16
MAX_PARTS = 1_000
MAX_CHOICES = 16
MAX_BIASES = 1_024
MAX_TOP_LOGPROBS = 20
Penalty = Annotated[float, Field(ge=-2, le=2)]
# Whether the model has an id is known once the model is; 18 digits fit into 64 bits.
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]


class Body(BaseModel):
    """The base of all request bodies: no coercion, no unknown fields, no NaN."""

    # What checks a body is made when the first such body comes, in 2 to 5 ms: a pod does not start
    # later for all the forms that nobody may ever send it.
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, defer_build=True
    )


class Sampling(Body):
    """How to choose tokens; shared by all ways to ask."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=1_000_000, description="0 or -1: all")
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Seed | None = None
    stop: StopString | list[StopString] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=MAX_BIASES
    )

    @field_validator("stop", mode="before")
    @classmethod
    def _few_stops(cls, value: Any) -> Any:
        if isinstance(value, list) and len(cast("list[Any]", value)) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings")
        return cast("Any", value)


class EarlyStopping(Body):
    """When to end for want of confidence."""

    min_prob: float = Field(gt=0, le=1)
    window: int = Field(ge=1, le=1_000)


class ObservedSampling(Sampling):
    """Sampling that tells, or goes by, how likely the tokens were."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    early_stop: EarlyStopping | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to tell with each token's log probability; None: neither."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _nothing(value: object) -> object:
    if value is not None:
        raise ValueError("not supported yet; leave it out")
    return value


def _empty(value: object) -> object:
    return _nothing(value or None)


# What cannot be had. Null does not ask for it, nor does an empty value where the field could have
# one; a zero where a list is to be is a mistake, and told.
Nothing = Annotated[Any, WithJsonSchema({"type": "null"}), AfterValidator(_nothing)]
NoText = Annotated[str | None, AfterValidator(_empty)]
NoItems = Annotated[list[Any] | None, AfterValidator(_empty)]
NoFields = Annotated[dict[str, Any] | None, AfterValidator(_empty)]


def only(*defaults: object) -> AfterValidator:
    """A check that lets through what is so without being asked for, and names it."""

    def check(value: object) -> object:
        if value is not None and value not in defaults:
            known = " and ".join(to_json(default).decode() for default in defaults)
            raise ValueError(f"only {known} can be had so far")
        return value

    return AfterValidator(check)


class TextPart(Body):
    """A part of a message; text is the only kind so far."""

    type: Literal["text"]
    text: str


# Fail fast here and below: a hundred thousand wrong items are one fault, not as many.
Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ChatMessage(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts | None = None
    name: str | None = Field(default=None, max_length=64)
    # What clients keep of an answer, and give back with it: nothing, here.
    refusal: NoText = None
    annotations: NoItems = None
    audio: NoFields = None
    function_call: NoFields = None
    tool_calls: NoItems = None

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise ValueError("content is required")
        return self

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class StreamOptions(Body):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


# What most pods are asked first: that answer does not wait.
class ChatCompletionRequest(ObservedSampling, defer_build=False):
    """`POST /v1/chat/completions`."""

    model: ModelName | None = None
    messages: Messages
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    service_tier: str | None = None
    # Only what comes to nothing:
    response_format: Annotated[dict[str, Any] | None, only({"type": "text"})] = None
    tools: NoItems = None
    functions: NoItems = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[list[str] | None, only(["text"])] = None
    audio: Nothing = None
    prediction: Nothing = None
    web_search_options: Nothing = None
    reasoning_effort: Annotated[str | None, only("none")] = None
    verbosity: Annotated[str | None, only("medium")] = None
    # No effect on the answer:
    parallel_tool_calls: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class FreeForm(Sampling):
    """What the native and the simple forms share: a conversation, or a plain prompt."""

    model: ModelName | None = None
    messages: Messages | None = None
    prompt: str | None = Field(default=None, min_length=1)

    def require_one_input(self) -> None:
        """Raise InvalidRequest unless there is a conversation or a prompt, and not both."""
        if (self.messages is None) == (self.prompt is None):
            given = "messages" if self.messages is None else "prompt"
            raise InvalidRequest("Give either messages or prompt.", param=given)


class TaskBody(FreeForm, ObservedSampling):
    """`POST /tasks`: the native form."""

    max_tokens: int | None = Field(default=None, ge=1)
    priority: Literal["interactive", "batch"] | None = None
    deadline_s: float | None = Field(default=None, gt=0, le=31_536_000)
