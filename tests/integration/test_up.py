"""`millstream up` serves, says what to do, starts again what dies, and minds ports and locks."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import redis
from tests.support.local_fleet import clean_environment, free_port
from tests.support.native import submit
from tests.support.store import Store
from tests.support.up_process import UpProcess, ask, finished_task
from tests.support.waiting import eventually


async def test_the_printed_curl_line_streams_an_answer(tmp_path: Path) -> None:
    async with UpProcess(tmp_path) as up:
        await up.ready()
        line = await up.says("curl -sSN")
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        answer = subprocess.check_output(line, shell=True, text=True, timeout=15)  # noqa: ASYNC221
        assert "What is the capital of France?" in line
        assert answer.startswith(": ok\n")
        assert answer.count('"delta"') > 10
        assert answer.endswith("data: [DONE]\n\n")
        assert await up.says("openai.OpenAI")
        assert up.stderr == []


async def test_two_pods_and_two_models_with_two_workers_each(tmp_path: Path) -> None:
    options = ("--apis", "2", "--workers", "2", "--model", "one", "--model", "org/two=bundled")
    async with UpProcess(tmp_path, *options) as up:
        first = await up.ready()
        second = (await up.says("ready at")).partition("also ")[2].strip(" )\n")
        await up.becomes(lambda: "".join(up.stdout).count("is ready\n") == 4, "four workers")
        assert (len(up.apis), len(up.workers), len(up.valkeys)) == (2, 4, 1)
        for url in (first, second):
            assert await ask(url, "one")
            assert await ask(url, "org/two")


async def test_a_killed_worker_and_a_killed_pod_are_started_again(tmp_path: Path) -> None:
    async with UpProcess(tmp_path) as up:
        url = await up.ready()
        worker, api = up.workers[0], up.apis[0]
        said = len(up.stdout)
        worker.kill()
        api.kill()
        await up.says("worker-0 was ended by SIGKILL; it is started again in 0.5 s", error=True)
        await up.says("api-0 was ended by SIGKILL; it is started again in 0.5 s", error=True)
        await up.says("worker-0: fake is ready", after=said)
        await up.becomes(lambda: _answers(f"{url}/health"), "the pod's return")
        assert await ask(url)
        assert up.workers[0].pid != worker.pid
        assert up.apis[0].pid != api.pid


async def test_the_database_is_started_again_with_its_data(tmp_path: Path) -> None:
    async with UpProcess(tmp_path) as up:
        url = await up.ready()
        task = await finished_task(url)
        before = up.valkeys[0]
        before.kill()
        await up.says("valkey was ended by SIGKILL; it is started again", error=True)
        await up.becomes(lambda: up.valkeys and up.valkeys[0].pid != before.pid, "another Valkey")
        await up.becomes(lambda: _answers(f"{url}/tasks/{task}"), "the finished task")
        # Its guard watches over the same processes as the one before.
        up.popen.kill()
        await up.nothing_left()


async def test_a_killed_guard_takes_its_database_along_and_both_return(tmp_path: Path) -> None:
    async with UpProcess(tmp_path) as up:
        url = await up.ready()
        task = await finished_task(url)
        guard, valkey = up.guards[0], up.valkeys[0]
        guard.kill()
        await up.says("valkey was ended by SIGKILL; it is started again", error=True)
        await up.becomes(lambda: up.valkeys and not valkey.is_running(), "another Valkey")
        await up.becomes(lambda: _answers(f"{url}/tasks/{task}"), "the finished task")


async def test_a_worker_that_dies_while_starting_shows_what_it_said(tmp_path: Path) -> None:
    hook = """
import os, sys
if "worker" in sys.orig_argv:
    print("something is missing", file=sys.stderr, flush=True)
    os._exit(7)
"""
    async with UpProcess(tmp_path, hook=hook) as up:
        await up.says(r"worker-0 ended with exit code 7; .* again in 0.5 s", error=True)
        await up.says(r"worker-0 \| something is missing", error=True)
        await up.says(r"worker-0 ended with exit code 7; .* again in 1 s", error=True)


async def test_a_worker_whose_settings_cannot_work_ends_the_fleet(tmp_path: Path) -> None:
    hook = """
import os, sys
if "worker" in sys.orig_argv:
    print("millstream: there is no model in /nowhere", file=sys.stderr, flush=True)
    os._exit(2)
"""
    async with UpProcess(tmp_path, hook=hook) as up:
        assert await up.ended() == 1
        assert up.stderr == ["millstream: worker-0 cannot start: there is no model in /nowhere\n"]
        assert up.processes() == []


async def test_a_model_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    async with UpProcess(tmp_path, "--model", "m=./none", engine="transformers") as up:
        assert await up.ended() == 2
        assert up.stdout == []
        (line,) = up.stderr
        assert "'./none': there is no such file or folder" in line


async def test_a_given_redis_is_used(tmp_path: Path, store: Store) -> None:
    async with UpProcess(tmp_path, redis_url=store.url) as up:
        url = await up.ready()
        assert await ask(url)
        assert up.valkeys == []
        assert not (tmp_path / "state").exists()
        with redis.Redis.from_url(store.url) as client:
            assert client.exists("{ms}:workers")
        up.popen.kill()
        await up.nothing_left()


async def test_a_given_redis_that_keeps_nothing_is_warned_of(tmp_path: Path, store: Store) -> None:
    store.configure("appendonly", "no")
    async with UpProcess(tmp_path, redis_url=store.url) as up:
        await up.says(
            f"{store.url}: no append-only file, so a restart loses every task", error=True
        )
        assert await ask(await up.ready())


async def test_a_redis_given_by_the_env_file_that_evicts_is_refused(
    tmp_path: Path, store: Store
) -> None:
    (tmp_path / ".env").write_text(f"MILLSTREAM_REDIS_URL={store.url}\n")
    store.configure("maxmemory-policy", "allkeys-lru")
    async with UpProcess(tmp_path) as up:
        assert await up.ended() == 1
        assert len(up.stderr) == 1
        assert f"{store.url}: maxmemory-policy is allkeys-lru" in up.stderr[0]
        assert "CONFIG SET maxmemory-policy noeviction" in up.stderr[0]


async def test_an_absent_redis_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"redis://user:secret@127.0.0.1:{free_port()}/0"
    async with UpProcess(tmp_path, redis_url=url) as up:
        assert await up.ended() == 2
        assert len(up.stderr) == 1
        assert "no Redis answers at redis://user:***@" in up.stderr[0]
        assert "secret" not in up.stderr[0]


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path, reuse: bool) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        async with UpProcess(tmp_path, "--apis", "2", "--port", str(port - 1)) as up:
            assert await up.ended() == 1
            assert up.stdout == []
            assert len(up.stderr) == 1
            assert re.search(rf"port ({port - 1}|{port}) is taken", up.stderr[0])
            assert "--port" in up.stderr[0]


async def test_commands_find_it_wherever_it_listens(tmp_path: Path) -> None:
    environment = clean_environment() | {"XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-m", "millstream", "top", "--json"]
    async with UpProcess(tmp_path) as up:
        url = await up.ready()
        out = subprocess.check_output(command, env=environment, timeout=20)  # noqa: ASYNC221
        assert [api["url"] for api in json.loads(out)["apis"]] == [url]
        up.popen.send_signal(signal.SIGINT)
        assert await up.ended() == 0
    told = subprocess.run(  # noqa: ASYNC221
        command, check=False, env=environment, capture_output=True, text=True, timeout=20
    )
    assert told.returncode == 1
    assert told.stderr.startswith("millstream: nobody answers at http://127.0.0.1:8000: ")
    assert told.stderr.endswith(
        "; `millstream up` starts a fleet, --url or MILLSTREAM_URL say where another one is\n"
    )


async def test_a_bad_setting_that_an_option_replaces_does_no_harm(tmp_path: Path) -> None:
    async with UpProcess(tmp_path, "--host", "127.0.0.1", host="", port="abc") as up:
        assert await ask(await up.ready())


async def test_a_second_up_says_all_that_stands_in_its_way(tmp_path: Path, redis_url: str) -> None:
    async with UpProcess(tmp_path) as first:
        url = await first.ready()
        port = url.rpartition(":")[2]
        async with UpProcess(tmp_path) as second:
            assert await second.ended() == 1
            assert len(second.stderr) == 1
            assert f"process {first.popen.pid}" in second.stderr[0]
            assert "XDG_STATE_HOME" in second.stderr[0]
        async with UpProcess(tmp_path, "--port", port) as third:
            assert await third.ended() == 1
            assert len(third.stderr) == 1
            assert f"process {first.popen.pid}" in third.stderr[0]
            assert f"Also, port {port} is that one's; take another --port" in third.stderr[0]
        async with UpProcess(tmp_path, redis_url=redis_url) as fourth:
            await fourth.ready()
        assert await ask(url)


async def test_verbose_shows_all_that_the_processes_log(tmp_path: Path) -> None:
    async with UpProcess(tmp_path, "--verbose") as up:
        await up.ready()
        await up.says(r"^worker-0 \| .* INFO ", error=True)
        await up.says(r"^valkey \| ", error=True)
        assert all(" | " in line for line in up.stderr)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


async def test_models_of_an_earlier_start_are_forgotten(tmp_path: Path) -> None:
    async with UpProcess(tmp_path, "--model", "old") as up:
        assert await ask(await up.ready(), "old")
    async with UpProcess(tmp_path, "--model", "one", "--model", "two") as up:
        url = await up.ready()
        async with httpx.AsyncClient(base_url=url, timeout=10) as http:
            # Ready means that every model is.
            listed = (await http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["one", "two"]
            answer = await http.post("/tasks", json={"model": "old", "prompt": "x"})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_model_with_unfinished_tasks_is_not_forgotten(tmp_path: Path) -> None:
    async with (
        UpProcess(tmp_path, "--model", "old") as up,
        httpx.AsyncClient(base_url=await up.ready(), timeout=10) as http,
    ):
        task_id = await submit(http, tokens=40, delay_s=30, delay_at=[11])

        async def ten() -> bool:
            usage = (await http.get(f"/tasks/{task_id}")).json()["usage"]
            return usage is not None and usage["completion_tokens"] == 10

        await eventually(ten, what="ten tokens")
    async with UpProcess(tmp_path, "--model", "new") as up:
        line = "old has 1 unfinished task of an earlier start, and is not served now"
        await up.says(f"^{line}; --model old=SOURCE goes on with it$", error=True)
        async with httpx.AsyncClient(base_url=await up.ready(), timeout=10) as http:
            assert (await http.get(f"/tasks/{task_id}")).json()["status"] == "running"
            stopped = await http.post(f"/tasks/{task_id}/stop")
            assert stopped.json()["status"] == "cancelled"
            assert stopped.json()["usage"]["completion_tokens"] == 10
