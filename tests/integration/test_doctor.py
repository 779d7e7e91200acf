"""`millstream doctor` on real servers, sound and unsound."""

import asyncio
import json
import os
import re
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.support.keys import make_key
from tests.support.local_fleet import free_port
from tests.support.store import Store
from tests.support.waiting import eventually

from millstream.fleet.chaos.link import Link
from millstream.fleet.cli import invoke
from millstream.fleet.doctor_redis import check_clock
from millstream.shared.connection import open_redis

DEPLOYMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


class Doctor:
    """The command, and what it found."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
        """The exit code, and per check the verdict and the text."""
        code = await asyncio.to_thread(invoke, ["doctor", "--json", "--port", "0", *arguments])
        said = json.loads(self._capsys.readouterr().out)
        assert said["healthy"] == (code == 0)
        return code, {row["check"]: (row["verdict"], row["text"]) for row in said["findings"]}


def faults(found: dict[str, tuple[str, str]]) -> set[str]:
    return {check for check, (verdict, _) in found.items() if verdict == "fault"}


@pytest.fixture
def doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    for name in list(os.environ):
        if name.startswith("MILLSTREAM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return Doctor(capsys)


@pytest.mark.timeout(90)  # the command six times, on a machine that may be busy
async def test_a_sound_redis_and_unsound_ones(
    doctor: Doctor, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MILLSTREAM_REDIS_URL", store.url)
    store.configure("maxmemory", "64mb")
    code, found = await doctor("--engine", "fake")
    # A busy machine may take its time for a call.
    assert {check for check, (verdict, _) in found.items() if verdict != "ok"} <= {"scripts"}, found
    assert code == 0
    assert found["version"][1].startswith("Valkey 9")
    assert "synced each second" in found["persistence"][1]
    async with open_redis(store.url) as opened:
        client: Any = opened
        assert await client.dbsize() == 0  # nothing is left behind

        for name, value in (
            ("maxmemory-policy", "allkeys-lru"),
            ("maxmemory", 0),
            ("timeout", 60),
            ("appendonly", "no"),
        ):
            store.configure(name, value)
        code, found = await doctor("--model", f"x={tmp_path}/none")
        assert code == 1
        assert {check: verdict for check, (verdict, _) in found.items() if verdict != "ok"} == {
            "eviction": "fault",
            "memory": "warning",
            "timeout": "warning",
            "persistence": "warning",
            "model x": "fault",
        }
        for check, words in (
            ("eviction", "CONFIG SET maxmemory-policy noeviction"),
            ("persistence", "set appendonly yes"),
            ("memory", "set maxmemory"),
            ("timeout", "set timeout 0"),
            ("model x", "there is no such file or folder"),
        ):
            assert words in found[check][1]

        # A full one, and users who may not do what is needed.
        store.configure("maxmemory-policy", "noeviction")
        store.configure("maxmemory", 1)
        code, found = await doctor("--engine", "fake")
        assert (code, faults(found)) == (1, {"memory", "permissions", "scripts"})
        store.configure("maxmemory", 0)
        store.configure("appendonly", "yes")
        (rules,) = re.findall(
            r"^user millstream (.*)$", DEPLOYMENT.read_text("utf-8"), re.MULTILINE
        )
        await client.execute_command("ACL", "SETUSER", "hosted", *rules.split(" "))
        monkeypatch.setenv("MILLSTREAM_REDIS_URL", store.url.replace("://", "://hosted:password@"))
        code, found = await doctor("--engine", "fake")
        assert (code, faults(found)) == (0, set())
        assert "does not say how it is synced" in found["persistence"][1]
        await client.execute_command("ACL", "SETUSER", "hosted", "-xadd", "-ssubscribe", "-info")
        code, found = await doctor("--engine", "fake")
        assert (code, faults(found)) == (1, {"permissions", "channels"})
        assert found["setup"][0] == "warning"


async def test_replicas(
    doctor: Doctor, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replica = Store(tmp_path / "replica")
    try:
        async with open_redis(replica.url) as client:
            await client.replicaof("127.0.0.1", store.port)

            async def in_step() -> bool:
                return (await client.info("replication"))["master_link_status"] == "up"

            await eventually(in_step, what="the replica")
        monkeypatch.setenv("MILLSTREAM_REDIS_URL", store.url)
        code, found = await doctor("--engine", "fake")
        assert (code, found["replication"][0]) == (0, "warning")
        assert "a primary with 1 replica; " in found["replication"][1]
        assert "set min-replicas-to-write 1" in found["replication"][1]
        store.configure("min-replicas-to-write", 1)
        _, found = await doctor("--engine", "fake")
        assert found["replication"] == ("ok", "a primary with 1 replica, min-replicas-to-write 1")
        monkeypatch.setenv("MILLSTREAM_REDIS_URL", replica.url)
        code, found = await doctor("--engine", "fake")
        assert (code, found["replication"][0]) == (1, "fault")
        assert "give its primary's URL" in found["replication"][1]
    finally:
        replica.end(signal.SIGKILL)


async def test_a_redis_that_is_far_away(
    doctor: Doctor, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Link(store.connect) as link:
        link.slow_down(0.02)
        monkeypatch.setenv("MILLSTREAM_REDIS_URL", link.url)
        code, found = await doctor("--engine", "fake")
    assert (code, found["scripts"][0]) == (0, "warning")
    (milliseconds,) = re.findall(r"a call takes ([\d.]+) ms: bring Redis", found["scripts"][1])
    assert float(milliseconds) > 40


def test_clocks() -> None:
    assert check_clock(-0.012).text == "12 ms apart from this machine's"
    assert check_clock(0.9).verdict == "ok"
    for ahead_s, words in ((61.5, "61.5 s ahead of this"), (-2.0, "2.0 s behind this")):
        finding = check_clock(ahead_s)
        assert finding.verdict == "warning"
        assert words in finding.text
        assert "run NTP on both" in finding.text


async def test_what_is_not_there(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = await doctor("--engine", "fake")
    assert (code, found["redis"][0]) == (0, "ok")  # `millstream up` starts one
    monkeypatch.setenv("MILLSTREAM_REDIS_URL", f"redis://me:secret@127.0.0.1:{free_port()}/0")
    code, found = await doctor("--engine", "fake")
    assert (code, faults(found)) == (1, {"redis"})
    assert "redis://me:***@127.0.0.1" in found["redis"][1]
    assert "version" not in found


@pytest.mark.usefixtures("doctor")
async def test_one_line_a_check(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    arguments = ["doctor", "--engine", "fake", "--port", str(store.port)]
    assert await asyncio.to_thread(invoke, arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok", "ok", "ok", "fault"]
    assert lines[-2].startswith(f"fault    port {store.port}: port {store.port} is taken")
    assert lines[-1] == "Not fit to run a fleet: 1 fault."
    assert await asyncio.to_thread(invoke, [*arguments[:-1], "0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Fit to run a fleet."


async def test_keys_and_tokens(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a Redis: what a pod with these settings would make of its callers."""

    async def look(**settings: object) -> dict[str, tuple[str, str]]:
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(f"MILLSTREAM_{name.upper()}", str(value))
            code, found = await doctor("--engine", "fake")
        assert code == int(bool(faults(found)))
        checks = ("keys", "key file", "tokens")
        return {check: found[check] for check in checks if check in found}

    file = tmp_path / "keys"
    assert await look() == {
        "keys": ("ok", "none are asked for, and only this machine can ask"),
    }
    verdict, text = (await look(host="0.0.0.0"))["keys"]
    assert (verdict, text[:18]) == ("fault", "anyone who reaches")
    verdict, text = (await look(host="0.0.0.0", allow_anonymous=1))["keys"]
    assert (verdict, "set MILLSTREAM_API_KEYS_FILE" in text) == ("warning", True)
    verdict, text = (await look(api_keys_file=file))["keys"]
    assert (verdict, text) == (
        "fault",
        f"{file}: cannot be read: No such file or directory; `millstream keys add NAME` makes it",
    )

    file.write_text("")
    file.chmod(0o600)
    found = await look(api_keys_file=file)
    assert found["keys"][0] == "fault"
    assert "nobody gets in: run `millstream keys add NAME`" in found["keys"][1]
    make_key(file, "ann")
    make_key(file, "gone", expires=datetime.now(UTC) - timedelta(days=1))
    assert await look(api_keys_file=file) == {
        "keys": ("ok", "1 key is taken"),
        "key file": ("ok", f"{file} has mode 600"),
    }
    file.chmod(0o644)
    assert (await look(api_keys_file=file))["key file"] == (
        "warning",
        f"{file} has mode 644: run `chmod 600 {file}`",
    )
    file.chmod(0o646)
    assert "anyone may write" in (await look(api_keys_file=file))["keys"][1]
    file.chmod(0o600)
    file.write_text("no JSON")
    assert (await look(api_keys_file=file))["keys"][0] == "fault"
    file.unlink()

    secret = "s" * 48
    assert (await look(jwt_issuer="x"))["keys"][0] == "fault"
    assert (await look(jwt_secret="short"))["keys"][0] == "fault"
    assert await look(jwt_secret=secret) == {"tokens": ("ok", "signatures can be checked")}
    closed = f"http://127.0.0.1:{free_port()}/keys"
    verdict, text = (await look(jwt_jwks_url=closed))["tokens"]
    assert (verdict, text.startswith(f"no keys from {closed}: ")) == ("fault", True)
    pem = tmp_path / "key.pem"
    public = Ed25519PrivateKey.generate().public_key()
    pem.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    verdict, text = (await look(jwt_public_key=pem, jwt_issuer="x"))["tokens"]
    assert (verdict, "set MILLSTREAM_JWT_AUDIENCE" in text) == ("warning", True)
    whole = await look(jwt_public_key=pem, jwt_issuer="x", jwt_audience="y", api_keys="k" * 20)
    assert {check: verdict for check, (verdict, _) in whole.items()} == {
        "keys": "ok",
        "tokens": "ok",
    }


@pytest.mark.model
@pytest.mark.timeout(90)  # it imports torch
async def test_what_a_worker_would_choose(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = pytest.importorskip("millstream.worker.engines.transformers_memory")
    container = tmp_path / "cgroup"
    container.mkdir()
    monkeypatch.setattr(memory, "_CGROUP", container)
    monkeypatch.setenv("MILLSTREAM_DEVICE", "cpu")
    (container / "memory.max").write_text(str(4 * 2**30))
    code, found = await doctor("--model", "x=bundled")
    assert code == 0
    assert {check: found[check][0] for check in found if check.endswith(" x")} == dict.fromkeys(
        ("model x", "engine x", "memory x", "cache x"), "ok"
    )
    assert re.match(r"float32 on cpu, \d+ threads? \(\S+", found["engine x"][1])
    assert found["memory x"][1] == "513 MiB of weights, 4,096 MiB free on cpu"
    assert "32 tasks of 640 tokens at once, or one of 8,192; " in found["cache x"][1]
    assert found["cache x"][1].startswith("20,480 tokens in ")

    # In less memory, and with a quota.
    (container / "cpu.max").write_text("100000 100000")
    (container / "memory.max").write_text(str(2**30))
    monkeypatch.setenv("MILLSTREAM_DTYPE", "bfloat16")
    monkeypatch.setenv("MILLSTREAM_MAX_CONCURRENT", "64")
    code, found = await doctor("--model", "x=bundled")
    assert code == 0
    assert found["engine x"][1].startswith("bfloat16 on cpu, 1 thread (")
    assert found["memory x"][1] == "257 MiB of weights, 1,024 MiB free on cpu"
    verdict, text = found["cache x"]
    assert (verdict, "less than MILLSTREAM_MAX_CONCURRENT=64" in text) == ("warning", True)

    # In none, and where nothing can be looked at.
    (container / "memory.max").write_text(str(2**20))
    code, found = await doctor("--model", "x=bundled")
    assert (code, found["memory x"][0], "cache x" in found) == (0, "warning", False)
    empty = tmp_path / "empty"
    empty.mkdir()
    code, found = await doctor("--model", f"x={empty}", "--model", "y=nobody/has-this")
    assert (code, faults(found)) == (1, {"model x"})
    assert found["model x"][1] == (
        f"{empty} has no config.json, no weights (model.safetensors or pytorch_model.bin, whole or "
        "in shards) and no tokenizer (tokenizer.json, tokenizer.model or vocab.json). "
        "Is it all there?"
    )
    assert "once it has been fetched" in found["model y"][1]
