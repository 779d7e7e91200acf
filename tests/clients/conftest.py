"""What tests of foreign clients share: the clients themselves, and a fleet to run them against."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.support.client_environment import PROGRAMS, ROOT, CannotInstall, ClientEnvironment
from tests.support.client_plan import Plan, make_plan, run_program
from tests.support.local_fleet import LocalFleet

Run = Callable[[str], Awaitable[dict[str, Any]]]


@pytest.fixture(scope="session")
def clients() -> ClientEnvironment:
    """Kept from run to run."""
    return ClientEnvironment(ROOT / "build/clients")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plan(shared_fleet: LocalFleet) -> Plan:
    return await make_plan(shared_fleet)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a client keeps what it keeps for its user."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def run(clients: ClientEnvironment, plan: Plan, home: Path) -> Run:
    """Runs a program of `programs` by the plan, and gives its report."""

    def call(name: str) -> dict[str, Any]:
        if name.endswith(".py"):
            return run_program([clients.command("python"), PROGRAMS / name], plan, home)
        node = clients.command("node")
        try:
            program = clients.node_program(name)
        except CannotInstall as error:
            pytest.skip(f"npm's registry does not give what package-lock.json names: {error}")
        return run_program([node, program], plan, home)

    async def in_thread(name: str) -> dict[str, Any]:
        return await asyncio.to_thread(call, name)

    return in_thread
