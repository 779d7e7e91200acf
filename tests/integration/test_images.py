"""The Dockerfiles: what must always hold of them, and (MILLSTREAM_TEST_IMAGES=1) a real build."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.support.compose_file import ROOT, Image
from tests.support.local_fleet import clean_environment

DOCKERFILES = {kind: ROOT / f"deploy/{kind}.Dockerfile" for kind in ("api", "worker")}
# A build from nothing took under five minutes on two cores; a slow mirror may take longer.
BUILD_S = 1800

every_image = pytest.mark.parametrize("kind", DOCKERFILES)


def run_lines(kind: str) -> list[str]:
    return [rest for word, rest in Image.read(DOCKERFILES[kind]).instructions if word == "RUN"]


@every_image
def test_the_base_can_be_chosen(kind: str) -> None:
    instructions = Image.read(DOCKERFILES[kind]).instructions
    word, base = instructions[0]
    assert word == "ARG"
    assert re.fullmatch(r"BASE=python:3\.\d+-slim", base)
    stages = [rest for name, rest in instructions if name == "FROM"]
    # Both stages on one base: the environment that is copied points at its interpreter.
    assert stages == ["${BASE} AS build", "${BASE}"]


@every_image
def test_it_runs_as_a_numbered_user_that_is_not_root(kind: str) -> None:
    image = Image.read(DOCKERFILES[kind])
    assert image.last("USER") == "10001:10001"
    words = [word for word, _ in image.last_stage]
    assert words.index("USER") > words.index("RUN")
    assert words.count("RUN") == 1


@every_image
def test_it_starts_and_checks_its_own_kind(kind: str) -> None:
    image = Image.read(DOCKERFILES[kind])
    assert image.entrypoint == ["millstream"]
    assert image.last("CMD") == f'["{kind}"]'
    assert image.last("HEALTHCHECK").endswith(
        f'CMD ["python", "/opt/millstream/healthcheck.py", "{kind}"]'
    )
    assert image.environment["PYTHONUNBUFFERED"] == "1"


@every_image
def test_it_is_labelled(kind: str) -> None:
    label = Image.read(DOCKERFILES[kind]).last("LABEL")
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in label


@every_image
def test_versions_are_those_that_were_tested(kind: str) -> None:
    installs = re.findall(r"pip install [^&]*", " && ".join(run_lines(kind)))
    assert len(installs) >= 2
    for install in installs:
        assert "${PIP_ARGS}" in install
        assert "-c requirements/constraints.txt" in install or "--no-deps" in install


def test_only_the_worker_gets_torch_and_the_model() -> None:
    api, worker = " ".join(run_lines("api")), " ".join(run_lines("worker"))
    assert '".[api,otel]"' in api
    assert not re.search(r"torch|worker|all\]|smollm", api)
    assert '".[worker,otel]"' in worker
    (model,) = re.findall(r"^MODEL = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"--no-deps {model} " in worker + " "


@every_image
def test_a_build_is_sent_what_it_copies_and_nothing_else(kind: str) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    for word, rest in Image.read(DOCKERFILES[kind]).instructions:
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert source in allowed, source
                assert (ROOT / source).exists(), source


def test_nothing_of_one_machine_is_named() -> None:
    texts = {path: path.read_text() for path in (ROOT / "deploy").iterdir() if path.is_file()}
    texts[Path("docker-compose.yml")] = (ROOT / "docker-compose.yml").read_text()
    for path, text in texts.items():
        assert not re.search(r"https?://(?!127\.0\.0\.1|localhost|api;|\$)", text), path


def test_the_script_is_valid_bash() -> None:
    script = ROOT / "deploy/build-images.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=10)


@pytest.mark.images
@pytest.mark.skipif(
    os.environ.get("MILLSTREAM_TEST_IMAGES") != "1",
    reason="builds container images for minutes: set MILLSTREAM_TEST_IMAGES=1",
)
@pytest.mark.timeout(BUILD_S + 60)
def test_the_images_answer_a_question() -> None:
    done = subprocess.run(
        [ROOT / "deploy/build-images.sh"],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "the images answer with Paris" in done.stdout
