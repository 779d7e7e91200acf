"""What `millstream doctor` looks at in a model: what a worker would run it with here, and why."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.fleet.plan import Model
from millstream.shared.errors import SettingsError
from millstream.shared.redis_check import Finding, Verdict
from millstream.shared.settings import Settings
from millstream.worker.engines.base import EngineSettings
from millstream.worker.engines.model_source import find_source

if TYPE_CHECKING:
    from millstream.worker.engines.transformers_forecast import Forecast


def examine_model(model: Model, settings: Settings) -> list[Finding]:
    """Can its engine be imported, is its source there, does it fit, and for how many tasks?

    No weights are loaded.
    """
    check = f"model {model.name}"
    if settings.engine == "fake":
        return [Finding(check, Verdict.OK, "the fake engine needs none")]
    missing = [
        package
        for package in ("torch", "transformers", "psutil")
        if importlib.util.find_spec(package) is None
    ]
    if missing:
        text = f"{' and '.join(missing)} not installed: run `pip install 'millstream[worker]'`"
        return [Finding(check, Verdict.FAULT, text)]
    try:
        source = find_source(model.source)
        # torch takes seconds to import; so it comes after all that may be wrong without it.
        from millstream.worker.engines.transformers_forecast import forecast

        told = forecast(
            EngineSettings(
                model=model.name,
                source=model.source,
                device=settings.device,
                dtype=settings.dtype,
                max_concurrent=settings.max_concurrent,
                trust_remote_code=settings.trust_remote_code,
            )
        )
    except SettingsError as error:
        return [Finding(check, Verdict.FAULT, error.message)]
    if told is None:
        text = f"{source} comes from the hub; what it takes can be told once it has been fetched"
        return [Finding(check, Verdict.OK, text)]
    where = f"{source} is there" if isinstance(source, Path) else f"{source} was fetched"
    return [
        Finding(check, Verdict.OK, where),
        Finding(f"engine {model.name}", Verdict.OK, _engine(told, settings)),
        _memory(f"memory {model.name}", told),
        *_cache(f"cache {model.name}", told, settings),
    ]


def _engine(told: "Forecast", settings: Settings) -> str:
    """Device and dtype, and what else there would be."""
    text = f"{told.dtype} on {told.device}"
    if told.threads is None:
        return text
    text += f", {told.threads} thread{'' if told.threads == 1 else 's'} ({told.threads_from})"
    if settings.dtype == "auto" and told.bfloat16:
        text += "; MILLSTREAM_DTYPE=bfloat16 takes half the memory, and is faster for a few streams"
    if settings.dtype == "auto" and told.int8:
        text += "; MILLSTREAM_DTYPE=int8 as well, for texts a little worse"
    return text


def _memory(check: str, told: "Forecast") -> Finding:
    """Whether the weights go into this machine's memory."""
    text = f"{_mib(told.weights)} of weights, {_mib(told.free)} free on {told.device}"
    if told.cache is None:
        more = "give it more, choose a smaller model, or a device that holds it"
        return Finding(check, Verdict.WARNING, f"{text}: {more}")
    return Finding(check, Verdict.OK, text)


def _cache(check: str, told: "Forecast", settings: Settings) -> list[Finding]:
    """How many tasks, of which length, a worker would hold at once."""
    cache = told.cache
    if cache is None:
        return []
    tokens, most = cache.cache_tokens, settings.max_concurrent
    typical = min(told.typical, told.context)
    text = (
        f"{tokens:,} tokens in {_mib(tokens * cache.bytes_per_token)}: {tokens // typical} tasks "
        f"of {typical} tokens at once, or one of {min(tokens, told.context):,}; steps of "
        f"{cache.batch_tokens} tokens"
    )
    if tokens // typical < most:
        text += (
            f"; less than MILLSTREAM_MAX_CONCURRENT={most} may ask for, so that some wait, or "
            "begin again: free memory, or set it lower"
        )
        return [Finding(check, Verdict.WARNING, text)]
    return [Finding(check, Verdict.OK, text)]


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
