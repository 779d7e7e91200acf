"""What a fleet consists of: pure mapping from settings and options to processes."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.shared.errors import SettingsError
from millstream.shared.settings import PREFIX, Settings, name_of_source

# -P keeps the working directory off the import path: a file there called, say, redis.py would be
# imported in place of the library.
_MILLSTREAM = (sys.executable, "-P", "-m", "millstream")


@dataclass(frozen=True, slots=True)
class Model:
    """A model to serve: the name callers use, and where its weights are."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process of the fleet: which subcommand, the how-manieth, and its own environment."""

    kind: str
    number: int
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """What the person at the terminal reads."""
        return f"{self.kind}-{self.number}"

    @property
    def command(self) -> list[str]:
        """What starts it."""
        return [*_MILLSTREAM, self.kind]


def parse_model(text: str, *, engine: str) -> Model:
    """Read `NAME=SOURCE`, or a SOURCE alone (for the fake engine, which has none, a NAME alone).

    Raises:
        SettingsError: a half is missing.
    """
    name, equals, source = text.partition("=")
    if equals and not Path(text).exists():
        if not name or not source:
            raise SettingsError(f"--model {text}: give NAME=SOURCE, or SOURCE alone")
        return Model(name, source)
    if engine == "fake":
        return Model(text, "bundled")
    return Model(name_of_source(text), text)


def choose_models(texts: Sequence[str], settings: Settings) -> list[Model]:
    """The models asked for by `--model`, or the one that the settings name.

    Raises:
        SettingsError: two models share a name.
    """
    if not texts:
        return [Model(settings.model_name, settings.model_source)]
    models = [parse_model(text, engine=settings.engine) for text in texts]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"two models are called {name}; name them by --model NAME=SOURCE")
    return models


def api_specs(
    settings: Settings, models: Sequence[Model], *, ports: Sequence[int], redis_url: str
) -> list[ProcessSpec]:
    """One API pod per port."""
    environment = {
        PREFIX + "REDIS_URL": redis_url,
        PREFIX + "HOST": settings.host,
        # A bad value in the environment that an option has replaced is none for them either.
        PREFIX + "ENGINE": settings.engine,
        # So that a pod knows the model, and takes tasks for it, before the first worker is ready.
        PREFIX + "MODEL": models[0].name if len(models) == 1 else "",
    }
    return [
        ProcessSpec(
            "api",
            number,
            {**environment, PREFIX + "PORT": str(port)},
        )
        for number, port in enumerate(ports)
    ]


def worker_specs(
    settings: Settings,
    models: Sequence[Model],
    *,
    per_model: int,
    redis_url: str,
    metrics_ports: Sequence[int] = (),
) -> list[ProcessSpec]:
    """The workers of all models, numbered through; each with a port of its own for its metrics."""
    served = [model for model in models for _ in range(per_model)]
    threads = _threads_each(len(served))
    return [
        ProcessSpec(
            "worker",
            number,
            {
                **threads,
                PREFIX + "REDIS_URL": redis_url,
                PREFIX + "ENGINE": settings.engine,
                PREFIX + "HOST": settings.host,
                PREFIX + "PORT": str(settings.port),
                PREFIX + "MODEL": model.name,
                PREFIX + "MODEL_SOURCE": model.source,
                **({PREFIX + "METRICS_PORT": str(metrics_ports[number])} if metrics_ports else {}),
            },
        )
        for number, model in enumerate(served)
    ]


def _threads_each(workers: int) -> dict[str, str]:
    """Share the cores out: each worker would take them all, and they would spin for each other."""
    if workers < 2 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}
