"""Who does the same otherwise: gateways, which keep nothing, and what is usually built on Redis.

The usual ways are `usual_relays` and `usual_queue` beside this. Gateways pass on an OpenAI server's
stream.

Each gateway lives in a virtual environment of its own, `build/peers-<name>`, made by hand:

    python -m venv build/peers-smg && build/peers-smg/bin/pip install smg

The packages are `litellm[proxy]`, `smg` and `vllm-router`; nginx is the system's.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks.support.crowd import chat, crowd
from benchmarks.support.processes import ROOT, Started, started
from tests.support.ports import free_port

WARM_S = 1.0
UP_S = 240.0  # LiteLLM imports for a minute or two on a machine that has other work
CASE_S = 30.0
WAITING = 500

_CLIENT = f"redis-py {version('redis')}"
SUBSCRIPTIONS = f"a subscription each ({_CLIENT})"
REDIS_STREAMS = f"Redis streams, XREAD BLOCK each ({_CLIENT})"

NGINX = """
worker_processes 1;
daemon off;
pid {folder}/pid;
error_log {folder}/error;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  keepalive_requests 1000000;  # a client asks them all on one connection
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{behind};
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_read_timeout 1h;
    }}
  }}
}}
"""
LITELLM = """
model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{behind}/v1", api_key: x}}
general_settings:
  dangerously_permit_weak_or_unset_master_key: true
"""


@dataclass(frozen=True)
class Peer:
    """A gateway: its name, and how it is started in a folder, on a port, before another port."""

    name: str
    version: str
    command: Callable[[Path, int, int], Sequence[str]]

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


def _nginx(program: str, folder: Path, port: int, behind: int) -> Sequence[str]:
    text = NGINX.format(folder=folder, port=port, behind=behind)
    (folder / "conf").write_text(text)
    return [program, "-c", str(folder / "conf"), "-e", str(folder / "error")]


def _litellm(program: str, folder: Path, port: int, behind: int) -> Sequence[str]:
    (folder / "conf.yaml").write_text(LITELLM.format(behind=behind))
    return [program, "--config", str(folder / "conf.yaml"), "--port", str(port), "--host",
            "127.0.0.1", "--num_workers", "1"]  # fmt: skip


def _router(program: str, folder: Path, port: int, behind: int) -> Sequence[str]:
    return [program, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
            "--worker-urls", f"http://127.0.0.1:{behind}"]  # fmt: skip


def _smg(program: str, folder: Path, port: int, behind: int) -> Sequence[str]:
    program, *options = _router(program, folder, port, behind)
    return [program, "launch", *options]


_PACKAGES = {"litellm": _litellm, "smg": _smg, "vllm-router": _router}


def installed() -> tuple[list[Peer], dict[str, str]]:
    """Those that are here, and why the others are left out."""
    found: list[Peer] = []
    missing: dict[str, str] = {}
    for package, command in _PACKAGES.items():
        program = ROOT / "build" / f"peers-{package}" / "bin" / package
        if not program.exists():
            missing[package] = f"not in build/peers-{package} (see benchmarks/support/peers.py)"
            continue
        listed = subprocess.run(
            [program.with_name("pip"), "show", package], capture_output=True, text=True, check=True
        )
        release = listed.stdout.partition("Version: ")[2].split("\n")[0]
        found.append(Peer(package, release, partial(command, str(program))))
    if nginx := shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin"):
        told = subprocess.run([nginx, "-v"], capture_output=True, text=True, check=True).stderr
        found.append(Peer("nginx", told.strip().rpartition("/")[2], partial(_nginx, nginx)))
    else:
        missing["nginx"] = "not installed"
    return found, missing


@contextmanager
def in_front(peer: Peer) -> Generator[tuple[Started, int]]:
    """A gateway, and the port of the fake server behind it.

    Raises:
        TimeoutError: it does not start in its time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port, behind = Path(name), free_port(), free_port()
        fake = [sys.executable, "-m", "benchmarks.support.fake_openai", str(behind)]
        with (
            started(fake, behind, log=folder / "fake", cwd=ROOT),
            started(
                peer.command(folder, port, behind), port, log=folder / "log", cwd=folder,
                up_s=UP_S, LITELLM_LOCAL_MODEL_COST_MAP="True",
            ) as gateway,
        ):  # fmt: skip
            yield gateway, behind


async def measure(
    peer: Peer, seconds: float, *, paced: tuple[int, float], flooded: int
) -> dict[str, dict[str, float]]:
    """The cases that a gateway has, by name: paced (streams, tokens/s), flooded (streams), idle.

    One for which it takes too long is left out.
    """
    figures: dict[str, dict[str, float]] = {}
    with in_front(peer) as (gateway, _):
        streams, rate = paced
        cases = {
            "paced": lambda: _through(gateway, [_asking(rate)] * streams, seconds),
            "idle chats": lambda: _idle(gateway),
            "flood": lambda: _through(gateway, [_asking(0)] * flooded, seconds),
        }
        for name, case in cases.items():
            with suppress(TimeoutError):
                async with asyncio.timeout(CASE_S):
                    figures[name] = await case()
    return figures


def _asking(rate: float | None) -> str:
    return chat(json.dumps({"rate": rate}))


async def _through(gateway: Started, requests: Sequence[str], seconds: float) -> dict[str, float]:
    async with crowd(gateway.port, requests) as readers:
        await asyncio.sleep(WARM_S)
        await readers.report()
        before = gateway.cpu_s()
        await asyncio.sleep(seconds)
        told = await readers.report()
        per_token = (gateway.cpu_s() - before) / max(1.0, told["tokens"]) * 1e6
    return {
        "pod_us_per_token": per_token,
        "tokens_per_core_s": 1e6 / per_token,
        "p50_ms": told["p50_ms"],
        "p99_ms": told["p99_ms"],
    }


async def _idle(gateway: Started) -> dict[str, float]:
    few = [_asking(None)] * (WAITING // 5)
    async with crowd(gateway.port, few):
        before = gateway.memory_mb()
        async with crowd(gateway.port, [_asking(None)] * WAITING):
            return {"mb_per_1000": (gateway.memory_mb() - before) / WAITING * 1000}
