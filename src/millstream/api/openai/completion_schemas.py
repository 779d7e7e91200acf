"""The body of `POST /v1/completions` as this server takes it."""

from typing import Annotated, Any, cast

from pydantic import Field, field_validator

from millstream.api.openai.schemas import (
    MAX_CHOICES,
    EarlyStopping,
    ModelName,
    Sampling,
    StreamOptions,
)
from millstream.shared.errors import InvalidRequest

MAX_PROMPTS = 64
MAX_TASKS = 64
MAX_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 16  # OpenAI's for this route

Text = Annotated[str, Field(min_length=1)]
# Whether the model has an id is known once the model is. Fail fast: a hundred thousand wrong items
# are one fault, not as many.
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1, fail_fast=True)
]
Prompts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
TokenPrompts = Annotated[
    list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
]


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    model: ModelName | None = None
    prompt: Text | Prompts | TokenIds | TokenPrompts
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    early_stop: EarlyStopping | None = None
    best_of: int | None = Field(default=None, ge=1, le=1, description="Only 1")
    suffix: str | None = None
    service_tier: str | None = None
    # No effect on the answer:
    user: str | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _few_prompts(cls, value: Any) -> Any:
        if isinstance(value, list):
            prompts = cast("list[Any]", value)
            if len(prompts) > MAX_PROMPTS and not isinstance(prompts[0], int):
                raise ValueError(f"at most {MAX_PROMPTS} prompts")
        return cast("Any", value)

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("not supported; leave it out")
        return value

    def check_together(self) -> None:
        """Raise InvalidRequest where fields that are right by themselves do not go together."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
        if len(self.prompts) * (self.n or 1) > MAX_TASKS:
            raise InvalidRequest(f"prompts x n may be {MAX_TASKS} at the most.", param="n")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest(
                "Log probabilities of the prompt cannot be had; leave out echo or logprobs.",
                param="logprobs",
            )

    @property
    def prompts(self) -> "list[str | list[int]]":
        """Each prompt: text, or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        texts = [part for part in prompt if isinstance(part, str)]
        if texts:
            return [*texts]
        lists = [part for part in prompt if isinstance(part, list)]
        if lists:
            return [*lists]
        return [[part for part in prompt if isinstance(part, int)]]
