"""When traces are wanted, and what is said where they cannot be had."""

import os
import subprocess
import sys

import pytest

from millstream.shared.schemas import Message, SamplingParams, TaskRequest
from millstream.shared.tracing import open_tracing, request_attributes, tracing_wanted

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, True),
    ],
)
def test_the_standard_variables_decide(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: bool
) -> None:
    set_variables(monkeypatch, variables)
    assert tracing_wanted() is wanted


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "by otlp over http/protobuf alone"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "by otlp over http/protobuf alone"),
        (ENDPOINT | {"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "max_queue_size must be"),
    ],
)
async def test_what_cannot_be_had_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    said: str,
) -> None:
    set_variables(monkeypatch, variables)
    async with open_tracing("api", "pod") as tracing:
        assert tracing is None
    (line,) = caplog.messages
    assert line.startswith("no traces: ")
    assert said in line


async def test_a_missing_extra_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_variables(monkeypatch, ENDPOINT)
    monkeypatch.delitem(sys.modules, "millstream.shared.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    async with open_tracing("worker", "w") as tracing:
        assert tracing is None
    assert caplog.messages == [
        "no traces: OpenTelemetry is not installed (pip install 'millstream[otel]')"
    ]


def test_nothing_is_imported_before_traces_are_wanted() -> None:
    program = (
        "import sys, millstream.api.app, millstream.worker.worker\n"
        "sys.exit(any(name.startswith('opentelemetry.exporter') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_attributes_say_nothing_that_a_caller_wrote() -> None:
    request = TaskRequest(
        "small", (Message("user", "a secret"),), sampling=SamplingParams(7, 0.5, stop=("secret",))
    )
    assert request_attributes(request) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "millstream",
        "gen_ai.request.model": "small",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 7,
    }
