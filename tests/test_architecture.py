"""What may import what, where the linter cannot look: at run time, without the heavy packages."""

import subprocess
import sys
from pathlib import Path

import millstream

BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(f"{{name}} must not be imported")
sys.meta_path.insert(0, Refuse())
import {module}
"""


def imports(module: str, without: set[str]) -> None:
    code = BLOCKED.format(names=without, module=module)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_api_runs_without_torch() -> None:
    imports(
        "millstream.api.server",
        {"torch", "transformers", "tokenizers", "numpy", "accelerate", "gguf", "safetensors"},
    )


def test_the_api_reads_no_tokens_that_it_was_not_set_up_for() -> None:
    imports("millstream.api.server", {"jwt", "cryptography"})


def test_the_worker_runs_without_an_http_framework() -> None:
    imports("millstream.worker.main", {"fastapi", "starlette", "uvicorn", "sse_starlette"})


def test_a_fake_worker_runs_without_torch() -> None:
    imports("millstream.worker.engines.fake", {"torch", "transformers"})


def test_the_help_needs_neither() -> None:
    imports("millstream.fleet.cli", {"torch", "transformers", "fastapi", "rich", "redis"})


def test_no_middleware_gathers_answers() -> None:
    """Starlette's base class does, and hides that a client has left (FAULTS B42, B43)."""
    sources = list(Path(millstream.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    assert [path for path in sources if "BaseHTTPMiddleware" in path.read_text()] == []
