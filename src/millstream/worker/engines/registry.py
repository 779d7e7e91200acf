"""Makes an engine by its name, and imports only the one that is asked for."""

from millstream.shared.errors import SettingsError
from millstream.worker.engines.base import Engine, EngineSettings

ENGINES = ("transformers", "fake")


def create_engine(name: str, settings: EngineSettings) -> Engine:
    """Make the engine called `name`, not yet started.

    Raises:
        SettingsError: there is no such engine, or its packages are not installed.
    """
    if name == "fake":
        from millstream.worker.engines.fake import FakeEngine

        return FakeEngine(settings)
    if name == "transformers":
        try:
            from millstream.worker.engines.transformers_engine import TransformersEngine
        except ImportError as error:
            raise SettingsError(
                f"The transformers engine needs packages that are not installed ({error}); "
                "run: pip install 'millstream[worker]'"
            ) from error
        return TransformersEngine(settings)
    raise SettingsError(f"There is no engine {name!r}; choose one of: {', '.join(ENGINES)}")
