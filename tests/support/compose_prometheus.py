"""The Prometheus of docker-compose.yml on this machine: its own files, other addresses."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.compose_file import ROOT
from tests.support.ports import free_port


def find_prometheus() -> str:
    """The Prometheus of the machine; else the test is skipped."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (apt install prometheus)")
    return binary


def prepare(
    service: Mapping[str, Any], folder: Path, targets: Mapping[str, list[str]], *, interval: str
) -> tuple[list[str], str]:
    """Write the files of one Prometheus into an empty folder.

    Args:
        targets: The addresses that a service's name stands for; those not given stand for none.
        interval: How often it scrapes.

    Returns:
        Its command, and its URL.
    """
    mounts = dict(reversed(v.removesuffix(":ro").split(":")) for v in service["volumes"])
    source = ROOT / mounts["/etc/prometheus"]
    shutil.copytree(source, folder / "etc")
    config = yaml.safe_load((source / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": interval, "evaluation_interval": interval}
    for job in config["scrape_configs"]:
        names = [name for lookup in job.pop("dns_sd_configs") for name in lookup["names"]]
        addresses = [address for name in names for address in targets.get(name, [])]
        job["static_configs"] = [{"targets": addresses}]
    # JSON is YAML.
    (folder / "etc/prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    places = {"/etc/prometheus/": f"{folder}/etc/", "=/prometheus": f"={folder}/data"}
    command = [find_prometheus()]
    for part in service["command"]:
        for old, new in places.items():
            part = part.replace(old, new)  # noqa: PLW2901
        command.append(part)
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    return command, f"http://127.0.0.1:{port}"
