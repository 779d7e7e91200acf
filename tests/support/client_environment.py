"""The clients that other projects make, in an environment of their own: installed once, then kept.

What they pull in has no place beside ours, and is pinned: `requirements/clients.txt` for Python,
which brings a Node.js too, and a lock file for that.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests/clients/programs"
PYTHON_PINS = ROOT / "requirements/clients.txt"
NODE_PINS = (PROGRAMS / "package.json", PROGRAMS / "package-lock.json")
INSTALL_S = 300


class CannotInstall(Exception):
    """A registry did not give what is pinned; the text is its client's last words."""


class ClientEnvironment:
    """A folder with the clients; each part is installed by whoever asks for it first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "bin"
        self._modules = folder / "node"

    def command(self, name: str) -> Path:
        """A command of a Python package, `python` itself among them.

        Raises:
            CannotInstall: the registry cannot be reached.
        """
        with _once(self._folder, [PYTHON_PINS]) as install:
            if install:
                shutil.rmtree(self._folder, ignore_errors=True)
                _call([sys.executable, "-m", "venv", "--without-pip", str(self._folder)])
                _call(
                    [sys.executable, "-m", "pip", "--disable-pip-version-check",
                     "--python", str(self._bin / "python"), "install",
                     *shlex.split(os.environ.get("PIP_ARGS", "")),  # make's
                     "--quiet", "--no-deps", "--no-compile", "-r", str(PYTHON_PINS)]
                )  # fmt: skip
        return self._bin / name

    def node_program(self, name: str) -> Path:
        """A program of ours, at a place where Node.js finds what it imports.

        Raises:
            CannotInstall: the registry cannot be reached.
        """
        npm = self.command("npm")
        with _once(self._modules, NODE_PINS) as install:
            if install:
                shutil.rmtree(self._modules, ignore_errors=True)
                self._modules.mkdir()
                for file in NODE_PINS:
                    shutil.copy(file, self._modules)
                # Without scripts: nothing of what is installed needs one.
                _call(
                    [str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                    folder=self._modules,
                    path=self._bin,
                )
            return Path(shutil.copy(PROGRAMS / name, self._modules))


@contextmanager
def _once(folder: Path, pins: Sequence[Path]) -> Generator[bool]:
    """Whether to install now: one process at a time, and never again what is there whole."""
    wanted = hashlib.sha256(b"".join(pin.read_bytes() for pin in pins) + sys.version.encode())
    done = folder / ".installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = not done.exists() or done.read_text() != wanted.hexdigest()
        yield missing
        if missing:
            done.write_text(wanted.hexdigest())


def _call(command: Sequence[str], *, folder: Path | None = None, path: Path | None = None) -> None:
    environment = dict(os.environ)
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment.get('PATH', os.defpath)}"
    done = subprocess.run(  # noqa: PLW1510 - judged by what it said
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=INSTALL_S
    )
    if done.returncode:
        raise CannotInstall("\n".join(done.stderr.strip().splitlines()[-4:]))
