"""Settings: read once from `MILLSTREAM_…` and `.env`, checked loudly, then frozen."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from millstream.shared.address import Topology, mask_password, parse_address
from millstream.shared.errors import SettingsError

PREFIX = "MILLSTREAM_"
ENV_FILE = ".env"
# What Kubernetes sets in the pods of a Service's namespace, for each port it has.
_SERVICE_LINK = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT|PORT_\d+_(TCP|UDP|SCTP))")
_PLAINLY = {
    "int_parsing": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
}
BUNDLED_MODEL = "smollm2-135m-instruct"


class Settings(BaseSettings):
    """Every setting of API pods and workers; each default works for `millstream up`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_file=ENV_FILE, extra="ignore", frozen=True, env_ignore_empty=True
    )

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        repr=False,  # it may hold a password
        description="Redis >= 7 or Valkey: `redis://`, `rediss://`, `unix://`, "
        "`redis+cluster://host:port,…` or `redis+sentinel://host:port,…/service`.",
    )
    shards: int = Field(
        default_factory=lambda data: _default_shards(data.get("redis_url", "")),
        ge=1,
        le=1024,
        description="Hash slots the fleet's keys are spread over, the same on every process "
        "(default: 4 on a cluster, else 1).",
    )
    host: str = Field(default="127.0.0.1", description="Address the API and metrics listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port the API listens on.")
    metrics_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port on which a worker shows its metrics, at the address HOST; 0: it does "
        "not. The workers of `millstream up` take this one and those after it.",
    )
    model: str = Field(
        default="",
        max_length=200,
        description="Name under which a worker offers its model (default: from the source); "
        "an API pod takes tasks for it even before a worker has joined.",
    )
    on_demand_models: str = Field(
        default="",
        description="Models, comma-separated, whose workers are started when tasks come: an API "
        "pod takes tasks for them, and is ready, though no worker has ever joined.",
    )
    model_source: str = Field(
        default="bundled",
        description="A local folder, a hub id, a `.gguf` file, or `bundled` "
        "(SmolLM2-135M-Instruct).",
    )
    engine: Literal["transformers", "fake"] = Field(
        default="transformers", description="`transformers`, or `fake` for tests and load."
    )
    device: str = Field(default="auto", description="`auto` (cuda, then mps, then cpu) or a name.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        default="auto",
        description="`auto` is float32 on a CPU and bfloat16 on a GPU; `int8` is for weights on a "
        "CPU.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether a model's own code from the hub may run."
    )
    max_concurrent: int = Field(
        default=32, ge=1, le=4096, description="Tasks a worker runs at once."
    )
    max_queue: int = Field(
        default=1000, ge=0, description="Tasks that may wait per model; more get a 503."
    )
    lease_s: float = Field(
        default=10.0,
        ge=0.5,
        le=3600,
        description="A worker silent, or without a decode step, for so long loses its tasks; a "
        "pod silent for so long, its places among its callers' streams.",
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        le=100,
        description="Workers a task may take down without any progress before it fails.",
    )
    drain_s: float = Field(
        default=20.0, ge=1, description="Longest time from SIGTERM to exit, for API and worker."
    )
    result_ttl_s: int = Field(
        default=3600, ge=1, description="How long a finished task can be read."
    )
    keepalive_s: float = Field(
        default=10.0, gt=0, description="Longest silence on an open stream before a comment line."
    )
    send_timeout_s: float = Field(
        default=40.0,
        ge=1,
        description="A reader that takes nothing of its stream, or has vanished, for so long is "
        "cut; it can resume.",
    )
    disconnect_grace_s: float = Field(
        default=0.0,
        ge=0,
        description="How long after the client went away its chat task is stopped.",
    )
    max_prompt_chars: int = Field(
        default=262_144,
        ge=1,
        description="Longest prompt, all messages together, in characters; a token id is four.",
    )
    max_tokens_limit: int = Field(
        default=131_072, ge=1, description="Longest answer a caller may ask for, in tokens."
    )
    max_task_s: int = Field(
        default=3600, ge=1, description="Longest life of a task from submit to end."
    )
    rate_limit_requests_per_min: int = Field(
        default=0,
        ge=0,
        description="Tasks a caller may ask for in any minute; 0, here and below: no limit. A "
        "key's own limits win.",
    )
    rate_limit_tokens_per_min: int = Field(
        default=0, ge=0, description="Tokens, read and made, of what it asks for in any minute."
    )
    rate_limit_concurrent_streams: int = Field(
        default=0, ge=0, description="Streams a caller may have open at once."
    )
    rate_limit_waiting_tasks: int = Field(
        default=0,
        ge=0,
        description="Tasks of a caller that may wait, per model; divided among the shards.",
    )
    rate_limit_minutes_per_stream: int = Field(
        default=0, ge=0, description="Longest life of a caller's task, in minutes."
    )
    rate_limit_tokens_per_stream: int = Field(
        default=0, ge=0, description="Longest answer to a caller, in tokens."
    )
    content_filter: str = Field(
        default="",
        description="File of words and `/expressions/`, one a line, that are neither taken in "
        "prompts nor sent in answers.",
    )
    content_filter_on: Literal["both", "input", "output"] = Field(
        default="both", description="What it looks at: prompts, answers, or both."
    )
    api_keys: SecretStr = Field(
        default=SecretStr(""),
        description="Keys that callers need, comma-separated: `SECRET` or `NAME:SECRET`.",
    )
    api_keys_file: str = Field(
        default="",
        description="File of hashed keys with their rights, kept by `millstream keys` and read "
        "again when it changes.",
    )
    jwt_secret: SecretStr = Field(
        default=SecretStr(""), description="Secret, 32 bytes or more, of JWTs signed by HS256."
    )
    jwt_public_key: str = Field(
        default="", description="Public key of JWTs: RSA, EC or Ed25519, as PEM or a file of it."
    )
    jwt_jwks_url: str = Field(default="", description="Where an issuer of JWTs shows its keys.")
    jwt_algorithms: str = Field(
        default="",
        description="The JWT algorithms that are taken, comma-separated (default: those of the "
        "key; RS256 and ES256 with `MILLSTREAM_JWT_JWKS_URL`).",
    )
    jwt_audience: str = Field(default="", description="What a JWT's `aud` must name.")
    jwt_issuer: str = Field(default="", description="What a JWT's `iss` must be.")
    allow_anonymous: bool = Field(
        default=False,
        description="Whether an API without keys may be reached from other machines.",
    )
    cors_origins: str = Field(
        default="auto",
        description="Origins whose pages may call the API, comma-separated, or `*`; `none`: no "
        "page may; `auto`: all where keys are needed, else pages of private addresses.",
    )
    url: str = Field(
        default="",
        description="Where `chat`, `top` and `bench` find the fleet (default: HOST and PORT if "
        "they are set, else your `millstream up`).",
    )
    api_key: SecretStr = Field(
        default=SecretStr(""), description="The key that `chat`, `top` and `bench` show."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="`text` or `json`.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least weighty lines that are logged."
    )
    fake_tokens_per_s: float = Field(
        default=0.0,
        ge=0,
        description="Speed of the fake engine per task; 0 is as fast as it goes.",
    )

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        parse_address(url)
        return url

    @field_validator("url")
    @classmethod
    def _web_address(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://\S+", url):
            raise ValueError("must begin with http:// or https://")
        return url

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, listed: str) -> str:
        for origin in filter(None, map(str.strip, listed.split(","))):
            # RFC 6454, 6.2; browsers send one of a page's file as `null`.
            if not re.fullmatch(r"\*|auto|none|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    f"{origin!r} is no origin such as https://chat.example:8443, without a path"
                )
        return listed

    @field_validator("model")
    @classmethod
    def _one_line(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("must have printable characters only")
        return name

    @property
    def model_name(self) -> str:
        """The name a worker offers its model under."""
        if self.model:
            return self.model
        if self.engine == "fake":
            return "fake"
        return name_of_source(self.model_source)

    @property
    def on_demand(self) -> frozenset[str]:
        """The names in `on_demand_models`."""
        return frozenset(name.strip() for name in self.on_demand_models.split(",") if name.strip())

    @property
    def live_ttl_s(self) -> int:
        """How long the keys of an unfinished task may live untouched."""
        return self.max_task_s + self.result_ttl_s


def _default_shards(redis_url: str) -> int:
    """Four spread over three equal primaries as 2, 1, 1; each one more is a call per step more."""
    return 4 if parse_address(redis_url).topology is Topology.CLUSTER else 1


def name_of_source(source: str) -> str:
    """The model name that a source gives when none is set: its last part, in lower case."""
    if source == "bundled":
        return BUNDLED_MODEL
    return Path(source.rstrip("/")).name.removesuffix(".gguf").lower() or "model"


def read_settings(overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read the environment and `.env`; `overrides` (from the command line) win.

    Raises:
        SettingsError: a value is bad, or a `MILLSTREAM_…` name is none of ours.
    """
    _refuse_unknown_names(_names_in_use())
    try:
        return Settings(**dict(overrides or {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        name = PREFIX + field.upper()
        message = _PLAINLY.get(first["type"], str(first["msg"]).removeprefix("Value error, "))
        given = first["input"]
        shown = mask_password(given) if isinstance(given, str) else given
        if Settings.model_fields[field].annotation is SecretStr:
            shown = "***"
        raise SettingsError(f"{name}={shown!r}: {message}") from None


def _names_in_use() -> set[str]:
    names = {name for name in os.environ if name.upper().startswith(PREFIX)}
    env_file = Path(ENV_FILE)
    if env_file.is_file():
        from dotenv import dotenv_values

        names |= {name for name in dotenv_values(env_file) if name.upper().startswith(PREFIX)}
    return names


def _refuse_unknown_names(names: set[str]) -> None:
    """pydantic-settings ignores a misspelt name in silence; an operator must hear of it."""
    known = {field.upper() for field in Settings.model_fields}
    for name in sorted(names):
        short = name.upper().removeprefix(PREFIX)
        if short not in known:
            close = difflib.get_close_matches(short, known, n=1)
            hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
            if _SERVICE_LINK.search(short):
                hint = "; Kubernetes sets it for a Service: enableServiceLinks: false in the pod"
            raise SettingsError(f"{name} is not a setting of Millstream{hint}")
