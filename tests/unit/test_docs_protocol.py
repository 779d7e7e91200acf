"""docs/protocol.md against the code and a real Valkey; and the drawing of keys and scripts."""

import inspect
import re
import time
from typing import Any

from tests.support.readme import ROOT, SOURCE, code_spans, table_rows
from tests.support.tombs import tombs_of

from millstream.api.auth.caller import Caller
from millstream.api.auth.tickets import Tickets
from millstream.shared import keys
from millstream.shared.drains import order_drain
from millstream.shared.keys import Keys
from millstream.shared.limits import Admitted, LimitStore
from millstream.shared.schemas import new_task_id
from millstream.shared.script_runner import PARTS
from millstream.shared.scripts import Scripts
from millstream.shared.steps import AppendRow, Refused, Submitted

DOCS = ROOT / "docs"
PROTOCOL = (DOCS / "protocol.md").read_text("utf-8")


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
    await scripts.delete(
        shard, task_id=new_task_id(0), caller="ann", result_ttl_s=3600, withdraw=True
    )
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
            name = re.sub(r":tombs:\d+:[a-z2-7]{2}$", ":tombs:<span>:<head>", name)
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
    (tombs,) = await tombs_of(client, first.task_id)
    assert day < await client.ttl(tombs) <= day + 6 * 3600 + 3600
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


def test_the_drawing_shows_keys_and_scripts_that_there_are() -> None:
    texts = re.findall(r">([^<>]*)</text>", (DOCS / "img/overview.svg").read_text("utf-8"))
    keys_drawn = {text.partition(":")[0] for text in texts if re.fullmatch(r"\w+:(id|model)", text)}
    assert keys_drawn == {"queue", "task", "log"}
    assert keys_drawn <= {name.split(":")[2] for name in names_of_the_code() if name.count(":") > 2}
    verbs = {"submit", "claim"} & set(texts)
    assert verbs <= {path.stem for path in (SOURCE / "shared/lua").glob("*.lua")}
    assert len(verbs) == 2
