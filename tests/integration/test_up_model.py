"""`millstream up` with a model that cannot be loaded: it is told once, and in one line."""

import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.up_process import UpProcess

CONFIG = "/nobody/none/resolve/main/config.json"


class Hub:
    """A hub that has nothing: busy at the first requests for a file, then sure of it.

    Of the second answer the client warns, since it tries again.
    """

    def __init__(self) -> None:
        asked = self.asked = Counter[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                asked[self.path] += 1
                self.send_response(503 if asked[self.path] <= 2 else 404)
                self.end_headers()

            do_GET = do_HEAD

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()
    thread = threading.Thread(target=found.server.serve_forever, args=[0.05])
    thread.start()
    yield found
    found.server.shutdown()
    thread.join(5)
    found.server.server_close()


@pytest.mark.timeout(90)  # it imports torch
async def test_a_hub_that_has_it_not_is_told_of_once_without_a_line_for_each_try(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    async with UpProcess(tmp_path, "--model", "m=nobody/none", engine="transformers") as up:
        assert await up.ended(within_s=60) == 1
        (line,) = up.stderr
        assert line.startswith(
            "millstream: worker-0 cannot start: MILLSTREAM_MODEL_SOURCE='nobody/none' cannot be "
            "loaded (OSError: "
        )
        assert line.endswith("(is it offline? HF_TOKEN opens gated ones).\n")
    assert hub.asked[CONFIG] == 3, hub.asked


@pytest.mark.parametrize(("code", "option"), [(2, ()), (2, ("--verbose",)), (1, ())])
async def test_what_a_worker_complains_of_after_a_warning_is_told_once(
    tmp_path: Path, code: int, option: tuple[str, ...]
) -> None:
    hook = f"""
import os, sys
if "worker" in sys.orig_argv:
    print("12:00:00 WARNING library: this may fail", file=sys.stderr)
    print("millstream: it failed", file=sys.stderr, flush=True)
    os._exit({code})
"""
    async with UpProcess(tmp_path, *option, hook=hook) as up:
        if code == 2:
            assert await up.ended() == 1
            told = "millstream: worker-0 cannot start: it failed\n"
        else:
            await up.says("worker-0 ended with exit code 1; .* again in 0.5 s", error=True)
            told = "worker-0 | millstream: it failed\n"
        said = up.stderr[: up.stderr.index(told) + 2]
        assert "worker-0 | 12:00:00 WARNING library: this may fail\n" in said
        assert [line for line in said if "it failed" in line] == [told]


async def test_what_a_worker_complains_of_and_goes_on_is_shown(tmp_path: Path) -> None:
    hook = """
import os, sys
if "worker" in sys.orig_argv:
    print("12:00:00 WARNING library: this may fail", file=sys.stderr)
    print("millstream: it failed", file=sys.stderr)
    print("and more", file=sys.stderr, flush=True)
    os._exit(2)
"""
    async with UpProcess(tmp_path, hook=hook) as up:
        assert await up.ended() == 1
        assert up.stderr == [
            "worker-0 | 12:00:00 WARNING library: this may fail\n",
            "worker-0 | millstream: it failed\n",
            "worker-0 | and more\n",
            "millstream: worker-0 cannot start: and more\n",
        ]


async def test_what_a_models_folder_lacks_is_named_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    async with UpProcess(tmp_path, "--model", f"m={folder}", engine="transformers") as up:
        assert await up.ended() == 2
        assert up.stdout == []
        assert up.stderr == [
            f"millstream: {folder} has no tokenizer (tokenizer.json, tokenizer.model or "
            "vocab.json). Is it all there?\n"
        ]
