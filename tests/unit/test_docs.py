"""The documents against the code: what they list is what there is."""

import inspect
import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError
from tests.support.readme import (
    README,
    ROOT,
    SETTINGS,
    SOURCE,
    code_spans,
    module_table,
    part_of,
    settings_table,
    source_folders,
    table_rows,
    with_part,
)

from millstream.api.app import create_app
from millstream.api.auth.caller import Caller
from millstream.api.auth.tickets import Tickets
from millstream.api.errors import status_of
from millstream.api.openai import mapping
from millstream.api.openai.completion_schemas import CompletionRequest
from millstream.api.openai.response_request import options_of
from millstream.api.openai.response_schemas import ResponseRequest
from millstream.api.openai.schemas import ChatCompletionRequest, TaskBody
from millstream.api.simple.schemas import SimpleBody, SimpleQuery
from millstream.shared import errors, keys
from millstream.shared.drains import order_drain
from millstream.shared.keys import Keys
from millstream.shared.limits import Admitted, LimitStore
from millstream.shared.schemas import new_task_id
from millstream.shared.script_runner import PARTS
from millstream.shared.scripts import Scripts
from millstream.shared.settings import PREFIX, Settings
from millstream.shared.steps import AppendRow, Refused, Submitted
from millstream.worker.engines.fake_script import Directive

DOCS = ROOT / "docs"
API = (DOCS / "api.md").read_text("utf-8")
PROTOCOL = (DOCS / "protocol.md").read_text("utf-8")
ARCHITECTURE = (DOCS / "architecture.md").read_text("utf-8")
AUDIT = (DOCS / "bug-audit.md").read_text("utf-8")
TESTING = (DOCS / "testing.md").read_text("utf-8")
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
DECISIONS = sorted((DOCS / "adr").glob("*.md"))


# What is written from the code.


def test_the_settings_are_those_of_the_code() -> None:
    text = SETTINGS.read_text("utf-8")
    assert text == with_part(text, "settings", settings_table()), "run `make docs`"


@pytest.mark.parametrize("folder", source_folders())
def test_every_module_is_named(folder: str) -> None:
    # Not its sentence: who mends a docstring need not think of this page at once.
    named, there = (
        re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE)
        for table in (part_of(ARCHITECTURE, f"modules {folder}"), module_table(folder))
    )
    assert named == there, "run `make docs`"


def test_every_folder_of_the_package_has_its_place() -> None:
    places = re.findall(r"<!-- begin modules (\S+) -->", ARCHITECTURE)
    assert sorted(places) == sorted(source_folders())


# README.md


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            goal = (page.parent / path).resolve() if path else page
            assert goal.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors(goal), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_settings_named_without_their_prefix_exist() -> None:
    known = {name.upper() for name in Settings.model_fields}
    known |= {PREFIX + name for name in known}
    others = {
        "STOP_GRACE_PERIOD",
        "PUBLISH_ADDRESS",
        "PYTEST_ARGS",
        "PIP_ARGS",
        "HF_TOKEN",
        "STARTING",
    }
    for page in (README, DOCS / "api.md", DOCS / "protocol.md", DOCS / "architecture.md"):
        spans = set(re.findall(r"`([A-Z][A-Z_]*_[A-Z]+)`", page.read_text("utf-8")))
        assert spans <= known | others, page.name


# protocol.md


def key_rows() -> dict[str, tuple[str, str]]:
    """Type and life of each key of the table."""
    return {code_spans(key)[0]: (kind, life) for key, kind, life in table_rows(PROTOCOL, "## Keys")}


def names_of_the_code() -> set[str]:
    shard = Keys(7)
    names = {keys.WORKERS, keys.APIS, keys.MODELS, keys.drain("<worker>")}
    placeholders = {"task_id": "<id>", "pod_id": "<pod>", "worker_id": "<worker>"}
    for name, method in inspect.getmembers(Keys, inspect.isfunction):
        if name.startswith("_"):
            continue
        parameters = [*inspect.signature(method).parameters][1:]
        values = [placeholders.get(parameter, f"<{parameter}>") for parameter in parameters]
        names.add(getattr(shard, name)(*values).replace("{ms:7}", "{ms:k}"))
    return {re.sub(r":[0-9a-f]{32}$", ":<hash>", name) for name in names}


def test_the_keys_are_those_of_the_code() -> None:
    assert set(key_rows()) == names_of_the_code()


async def test_types_and_lives_of_keys_are_those_of_redis(scripts: Scripts) -> None:
    shard, model = Keys(0), "small"
    client: Any = scripts._client

    async def claim(worker: str, **changes: Any):
        arguments = {"free": 2, "running": 0, "lease_s": 0.001, "max_attempts": 1, "sweep": True}
        lives = {"live_ttl_s": 7200, "result_ttl_s": 3600, "max_task_s": 60}
        arguments |= lives | changes
        return (await scripts.claim(shard, worker=worker, model=model, **arguments))[0]

    async def offer(max_queue: int = 9, caller: str = "ann", **changes: Any) -> Any:
        return await scripts.submit(
            shard,
            task_id=new_task_id(0),
            model=model,
            caller=caller,
            request=b"{}",
            max_queue=max_queue,
            live_ttl_s=7200,
            **changes,
        )

    async def submit(**changes: Any) -> str:
        answer = await offer(**changes)
        assert isinstance(answer, Submitted)
        return answer.task_id

    # One that ends well, one that is lost and so goes to the dead letters, and one that runs.
    limits = LimitStore(scripts.runner, shards=1, lease_s=9)
    admitted = await limits.admit(
        "ann", request_id="1", requests_per_min=9, tokens_per_min=99, prompts=[1], max_tokens=9
    )
    assert isinstance(admitted, Admitted)
    assert await limits.open_stream("ann", "1", most=9)
    await submit(
        idempotency_key="key",
        body_hash="1",
        admitted_ms=admitted.at_ms,
        reserved=admitted.reserved,
    )
    (first,) = await claim("one")
    end = AppendRow(first.task_id, 1, 3, 1, [("5", '"x"')], "completed", "stop")
    await scripts.append(shard, worker="one", model=model, result_ttl_s=3600, rows=[end])
    await submit()
    (lost,) = await claim("one", lease_s=60)
    await scripts.release(
        shard, worker="one", model=model, lease_s=60, blame="it died",
        tasks=[(lost.task_id, lost.attempt)],
    )  # fmt: skip
    assert await claim("two", lease_s=60) == []
    for caller in ("ann", "bob", "bob"):
        await submit(caller=caller)
    running, *_ = await claim("two", free=4)
    await Tickets(scripts.runner).issue(running.task_id, Caller("ann"))
    for registry in (keys.WORKERS, keys.APIS):
        await scripts.heartbeat(registry, member="x", json=b"{}", ttl_s=10, model=model)
    await order_drain(scripts, "x", lease_s=10)

    def use(match: re.Match[str]) -> str:
        return f"{match[1]}{':<caller>' if match[2] else ''}:<day>"

    documented = key_rows()
    seen: set[str] = set()

    async def look() -> None:
        async for raw in client.scan_iter("*"):
            key = raw.decode()
            name = key.replace("{ms:0}", "{ms:k}").replace(f":{model}", ":<model>")
            name = re.sub(r":t0-[a-z2-7]{26}$", ":<id>", name)
            name = re.sub(r":[0-9a-f]{32}$", ":<hash>", name)
            name = re.sub(rf":({'|'.join(keys.LEVELS)}):", ":<level>:", name)
            name = re.sub(r"(usage|callers)(:ann)?:\d+$", use, name)
            name = name.replace(":ann", ":<caller>").replace("drain:x", "drain:<worker>")
            kind = (await client.type(key)).decode().replace("zset", "sorted set")
            assert documented[name][0].startswith(kind), key
            assert await client.ttl(key) > 0, key
            seen.add(name)

    await look()  # a worker stands idle
    await submit()
    assert isinstance(await offer(max_queue=1), Refused)
    await look()  # a task waits
    channels = {name for name, (kind, _) in documented.items() if kind == "sharded channel"}
    assert seen == set(documented) - channels

    day = 86_400
    assert day < await client.ttl(shard.tomb(first.task_id)) <= day + 3600
    assert 3500 < await client.ttl(shard.log(first.task_id)) <= 3600
    assert 7100 < await client.ttl(shard.task(running.task_id)) <= 7200
    assert 6 * day < await client.ttl(shard.queue(model)) <= 7 * day
    assert 29 * day < await client.ttl(shard.dead(model)) <= 30 * day
    for key in (shard.requests, shard.tokens, shard.ended):
        assert 110 <= await client.ttl(key("ann")) <= 120
    today = int(time.time()) // day
    assert 39 * day < await client.ttl(shard.usage("ann", today)) <= 40 * day
    assert 6 * day < await client.ttl(keys.MODELS) <= 7 * day
    assert 90 <= await client.ttl(keys.WORKERS) <= 110

    fields = set()
    for task_id in (first.task_id, lost.task_id):
        fields |= {name.decode() for name in await client.hkeys(shard.task(task_id))}
    told = {
        field for row in table_rows(PROTOCOL, "### The task hash") for field in code_spans(row[0])
    }
    # Those that only a task with readers, or one that moved on after a loss, has.
    assert told == fields | {"followers", "unheard_since", "lost", "lost_seq", "rewound_at"}


def test_every_script_is_described() -> None:
    scripts = {file.stem for file in (SOURCE / "shared" / "lua").glob("*.lua")} - {*PARTS}
    described = PROTOCOL.split("\n## The scripts\n")[1].split("\n## ")[0]
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", described, re.M | re.S))
    assert set(sections) == scripts
    for name, section in sections.items():
        text = (SOURCE / "shared" / "lua" / f"{name}.lua").read_text("utf-8")
        head = "".join(line for line in text.splitlines() if line.startswith("--"))
        # Names of one word, such as `worker`, would be found anywhere.
        arguments = re.findall(r"[a-z]+(?:_[a-z]+)+", head.partition("ARGV")[2].partition("->")[0])
        assert [argument for argument in arguments if f"`{argument}`" not in section] == [], name


# architecture.md


def test_decisions_are_numbered_and_listed() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert len(set(numbers)) == len(numbers)
    for number, page in zip(numbers, DECISIONS, strict=True):
        text = page.read_text("utf-8")
        assert text.startswith(f"# {number}. "), page.name
        assert "\n## Context\n" in text, page.name
        assert "\n## Decision\n" in text, page.name
        assert len(text.split()) < 600, f"{page.name} is longer than a page"
        assert f"](adr/{page.name})" in ARCHITECTURE, page.name


def test_the_drawing_shows_keys_and_scripts_that_there_are() -> None:
    texts = re.findall(r">([^<>]*)</text>", (DOCS / "img/overview.svg").read_text("utf-8"))
    keys_drawn = {text.partition(":")[0] for text in texts if re.fullmatch(r"\w+:(id|model)", text)}
    assert keys_drawn == {"queue", "task", "log"}
    assert keys_drawn <= {name.split(":")[2] for name in names_of_the_code() if name.count(":") > 2}
    verbs = {"submit", "claim"} & set(texts)
    assert verbs <= {path.stem for path in (SOURCE / "shared/lua").glob("*.lua")}
    assert len(verbs) == 2


# api.md


def test_every_endpoint_is_described() -> None:
    app, _ = create_app(Settings.model_construct())
    there = {
        f"{method.upper()} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    described = {code_spans(row[0])[0] for row in table_rows(API, "## Endpoints")}
    there |= {"GET /", "GET /fleet"}  # pages are for people, not for clients made of the schema
    assert {re.sub(r"\{name:path\}", "{name}", route) for route in there} == described


def test_every_error_code_is_described() -> None:
    described = {(row[0], code_spans(row[1])[0]) for row in table_rows(API, "## Errors")}
    codes = set()
    for file in [*SOURCE.glob("[asw]*/**/*.py"), *SOURCE.glob("shared/lua/*.lua")]:
        codes |= set(re.findall(r'(?:code=|"code": )"(\w+)"', file.read_text("utf-8")))
    by_status = {code: status for status, code in described}
    for name, error in inspect.getmembers(errors, inspect.isclass):
        if issubclass(error, errors.MillstreamError) and error not in (
            errors.SettingsError,  # ends a process
            errors.TaskFailed,  # tells the task's own code
            errors.FleetUnavailable,  # always one of its kinds
        ):
            codes.add(error.default_code)
            assert by_status[error.default_code] == str(status_of(error("")))
            assert name
    assert {code for _, code in described} == codes | {"not_found", "method_not_allowed"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], **fields}
    )


def test_the_fields_of_a_chat_are_those_of_its_schema() -> None:
    rows = {code_spans(name)[0]: text for name, text in table_rows(API, "### Fields of a chat")}
    assert set(rows) == set(ChatCompletionRequest.model_fields)
    refused = {
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function"}],
        "functions": [{"name": "f"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy"},
        "prediction": {"type": "content"},
        "web_search_options": {},
    }
    refused |= dict.fromkeys(("tool_choice", "function_call"), "required")
    refused |= dict.fromkeys(("reasoning_effort", "verbosity"), "low")
    assert {name for name, text in rows.items() if text.startswith("refused")} == set(refused)
    for name, bad in refused.items():
        with pytest.raises(ValidationError, match=name):
            chat(**{name: bad})
        chat(**{name: None})
        _, _, excepted = rows[name].partition("but for ")
        for good in re.findall("`(.+?)`", excepted):
            chat(**{name: good if good.isalpha() else json.loads(good)})

    ignored = {name for name, text in rows.items() if text == "ignored"}
    plain = mapping.sampling_of(chat(), None)
    values = {"metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True}
    for name in ignored:
        assert mapping.sampling_of(chat(**{name: values.get(name, "x")}), None) == plain
    supported = {name for name, text in rows.items() if text.startswith("supported")}
    assert supported | set(refused) | ignored == set(rows)


def test_the_fields_of_a_completion_are_those_of_its_schema() -> None:
    rows = dict(table_rows(API, "### Fields of a completion"))
    described = {code_spans(name)[0] for name in rows}
    assert described == set(CompletionRequest.model_fields)
    for name, value in {"suffix": "x", "best_of": 2}.items():
        assert rows[f"`{name}`"].startswith("refused")
        with pytest.raises(ValidationError, match=name):
            CompletionRequest.model_validate({"prompt": "x", name: value})


def test_the_fields_of_a_response_are_those_of_its_schema() -> None:
    rows = {code_spans(row[0])[0]: row[1] for row in table_rows(API, "### Fields of a response")}
    assert set(rows) == set(ResponseRequest.model_fields)
    refused = {
        "text": {"format": {"type": "json_object"}},
        "truncation": "auto",
        "tools": [{}],
        "tool_choice": "required",
        "top_logprobs": 1,
        "reasoning": {"effort": "low"},
        "conversation": "conv_1",
        "prompt": {"id": "x"},
    }
    assert {name for name, text in rows.items() if text.startswith("refused")} == set(refused)
    for name, value in refused.items():
        with pytest.raises(ValidationError, match=name):
            ResponseRequest.model_validate({"input": "x", name: value})
    again = {name for name, text in rows.items() if text.startswith("said again")}
    assert again <= set(msgspec.structs.asdict(options_of(ResponseRequest(input="x"), 0)))


def test_the_fields_of_a_task_are_those_of_its_schema() -> None:
    described = {code_spans(row[0])[0] for row in table_rows(API, "### Fields of a task")}
    assert described == set(TaskBody.model_fields)


def test_the_fields_of_a_simple_request_are_those_of_its_schemas() -> None:
    described = {code_spans(row[0])[0] for row in table_rows(API, "### Fields of a simple request")}
    assert described == set(SimpleBody.model_fields)
    in_a_query = described - {"messages", "stream"} | {"idempotency_key"}
    assert in_a_query == set(SimpleQuery.model_fields)


# bug-audit.md


def test_every_bug_of_the_list_has_its_line() -> None:
    (numbers,) = re.findall(r"numbers are those of .*?: ([\d, \-\n]+)\.", AUDIT)
    listed: list[int] = []
    for part in numbers.split(","):
        first, _, last = part.strip().partition("-")
        listed += range(int(first), int(last or first) + 1)
    rows = re.findall(r"^\| B(\d+) \| .+ \| (.+) \|$", AUDIT, re.MULTILINE)
    assert [int(number) for number, _ in rows] == listed
    missing: list[str] = []
    for number, here in rows:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", here)
        assert tests or "not built yet: issue" in here, f"B{number} has no test"
        for file, name in tests:
            path = ROOT / "tests" / file
            text = path.read_text("utf-8") if path.exists() else ""
            if not re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE):
                missing.append(f"B{number}: {file}::{name}")
    assert not missing


# testing.md


def test_the_directives_are_those_of_the_fake_engine() -> None:
    described = {code_spans(row[0])[0] for row in table_rows(TESTING, "## The fake engine")}
    assert described == {field.encode_name for field in msgspec.structs.fields(Directive)}


def test_the_markers_are_those_of_pytest() -> None:
    described = [code_spans(row[0])[0] for row in table_rows(TESTING, "### Markers")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    markers = project["tool"]["pytest"]["ini_options"]["markers"]
    assert described == [marker.partition(":")[0] for marker in markers]
