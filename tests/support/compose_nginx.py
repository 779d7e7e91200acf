"""The front door of docker-compose.yml on this machine: its own files, other paths and ports."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.certificate import make_certificate
from tests.support.compose_file import ROOT
from tests.support.local_fleet import free_port

NOBODY = 65534


def find_nginx() -> str:
    """The nginx of the machine, installed if that is possible; else the test is skipped."""
    binary = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if binary is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-qq"], ["install", "-y", "-qq", "nginx-light"]):
            subprocess.run(["apt-get", *command], env=environment, check=False, timeout=120)
        binary = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if binary is None:
        pytest.skip("nginx is not installed, and cannot be without root and apt")
    return binary


def replace(text: str, old: str, new: str, *, times: int = 1) -> str:
    """Replace what must be there exactly so often."""
    assert text.count(old) == times, f"{old!r} is there {text.count(old)} times, not {times}"
    return text.replace(old, new)


@dataclass(frozen=True)
class FrontDoor:
    """How to start an nginx, and where it will be found."""

    command: list[str]
    url: str
    operators_url: str
    tls_url: str
    """Empty without TLS."""
    certificate: Path
    """What a client must trust, where there is TLS."""


def prepare(
    service: Mapping[str, Any],
    folder: Path,
    pods: list[str],
    changes: Mapping[str, str],
) -> FrontDoor:
    """Write the files of one nginx into an empty folder; `changes` are further replacements.

    A service that mounts nginx-tls.conf gets a certificate too.
    """
    mounts = dict(reversed(v.removesuffix(":ro").split(":")) for v in service["volumes"])
    port, operators, tls = free_port(), free_port(), free_port()
    config = (ROOT / mounts["/etc/nginx/nginx.conf"]).read_text()
    config = replace(config, "listen 8080 ", f"listen 127.0.0.1:{port} ")
    config = replace(config, "listen 8081 ", f"listen 127.0.0.1:{operators} ")
    config = replace(config, "$server_port != 8081", f"$server_port != {operators}")
    # The nginx of Debian 12 knows no `resolve`; and there is no Docker to ask.
    config = replace(
        config,
        "server api:8000 resolve max_fails=0;",
        " ".join(f"server {pod} max_fails=0;" for pod in pods),
    )
    config = replace(config, " /tmp/", f" {folder}/", times=6)
    config = replace(config, "include /etc/nginx/edge/", f"include {folder}/edge/")
    for old, new in changes.items():
        config = replace(config, old, new)
    path = folder / "nginx.conf"
    path.write_text(config)
    tls_file = mounts.get("/etc/nginx/edge/tls.conf")
    if tls_file:
        text = (ROOT / tls_file).read_text()
        text = replace(text, "listen 8443 ssl ", f"listen 127.0.0.1:{tls} ssl http2 ")
        text = replace(text, "http2 on;", "")  # the nginx of Debian 12 has it in `listen`
        text = replace(text, " /etc/nginx/certificates/", f" {folder}/", times=2)
        (folder / "edge").mkdir()
        (folder / "edge/tls.conf").write_text(text)
        make_certificate(folder)
    return FrontDoor(
        _command(service, path),
        url=f"http://127.0.0.1:{port}",
        operators_url=f"http://127.0.0.1:{operators}",
        tls_url=f"https://127.0.0.1:{tls}" if tls_file else "",
        certificate=folder / "fullchain.pem",
    )


def _command(service: Mapping[str, Any], config: Path) -> list[str]:
    """The service's own, as a user without rights, as in its container."""
    assert service["entrypoint"] == ["nginx"]
    command = [
        str(config) if part == "/etc/nginx/nginx.conf" else part
        for part in [find_nginx(), *service["command"]]
    ]
    assert str(config) in command
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    if os.geteuid() == 0:
        folder = config.parent
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
        user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        command = ["setpriv", *user, "--no-new-privs", *command]
    return command
