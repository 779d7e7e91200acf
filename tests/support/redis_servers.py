"""Real Valkeys for tests: one, a cluster of them, or a master with its replica and a Sentinel."""

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
from tests.support.ports import free_port
from tests.support.store import DATABASES, launch

from millstream.shared.cluster import BoundedCluster

SLOTS = 16384
SERVICE = "millstream"


class Valkey:
    """One server process, which can be killed and started again on its data."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.arguments = [
            *("--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(folder), "--save", "", *options),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of its first database."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> "Valkey":
        """Start it and wait until it answers."""
        self.process = launch(self.port, *self.arguments)
        return self

    def call(self, *command: str | int) -> Any:
        """Ask it something; the answer as it comes over the wire."""
        with redis.Redis(port=self.port, decode_responses=True) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


def wait_for(holds: Callable[[], bool], what: str) -> None:
    """Wait for what a server does by itself within seconds."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)


class SingleServer:
    """One server; each URL is a database of its own."""

    def __init__(self, folder: Path) -> None:
        self._valkey = Valkey(folder, "--appendonly", "no", "--databases", str(DATABASES))
        self._count = 0

    def start(self) -> None:
        self._valkey.start()

    def fresh_url(self, *, shared: bool = False) -> str:
        """Where there is no key yet; `shared` outlives the next one."""
        self._count += 1
        return f"redis://127.0.0.1:{self._valkey.port}/{self._count}"

    def kill(self) -> None:
        self._valkey.kill()


class ClusterServers:
    """A Redis Cluster: `primaries` that share the slots evenly, each with so many replicas."""

    def __init__(self, folder: Path, *, primaries: int = 3, replicas: int = 0) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1500")
        options += ("--cluster-require-full-coverage", "no")
        options += ("--repl-diskless-sync-delay", "0")
        # The bus's own default, 10,000 above the port, may be above what there is.
        self._buses = [free_port() for _ in range(primaries * (1 + replicas))]
        self.nodes = [
            Valkey(folder / f"node-{at}", *options, "--cluster-port", str(bus))
            for at, bus in enumerate(self._buses)
        ]
        self._primaries = primaries

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        """Start the nodes and join them; return when each knows all slots."""
        first, *others = [node.start() for node in self.nodes]
        primaries, replicas = self.nodes[: self._primaries], self.nodes[self._primaries :]
        count = len(primaries)
        for at, node in enumerate(primaries):
            slots = (at * SLOTS // count, (at + 1) * SLOTS // count - 1)
            node.call("CLUSTER", "ADDSLOTSRANGE", *slots)
            node.call("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
        for node in others:
            node.call("CLUSTER", "MEET", "127.0.0.1", first.port, self._buses[0])
        everyone = f"cluster_known_nodes:{len(self.nodes)}"
        self._until(self.nodes, everyone, "CLUSTER", "INFO")
        for at, node in enumerate(replicas):
            node.call("CLUSTER", "REPLICATE", primaries[at % count].call("CLUSTER", "MYID"))
        self._until(self.nodes, "cluster_state:ok", "CLUSTER", "INFO")
        self._until(replicas, "master_link_status:up", "INFO", "replication")

    def _until(self, nodes: Sequence[Valkey], words: str, *command: str) -> None:
        wait_for(lambda: all(words in node.call(*command) for node in nodes), words)

    def home_of(self, key: str) -> Valkey:
        """The node that is the primary for a key, in the eyes of the first one that lives."""
        witness = next(node for node in self.nodes if node.process is not None)
        slot = witness.call("CLUSTER", "KEYSLOT", key)
        for first, last, primary, *_ in witness.call("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == primary[1])
        raise AssertionError(f"no node has {key}")

    def fresh_url(self, *, shared: bool = False) -> str:
        """The cluster, emptied."""
        for node in self.nodes:
            if "role:master" in node.call("INFO", "replication"):
                node.call("FLUSHALL")
        return self.url

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


class TwoClusters:
    """A cluster has no databases: one for what a module shares, one emptied for each test."""

    def __init__(self, folder: Path) -> None:
        self._shared = ClusterServers(folder / "shared")
        self._own = ClusterServers(folder / "own")

    def start(self) -> None:
        self._shared.start()
        self._own.start()

    def fresh_url(self, *, shared: bool = False) -> str:
        """Where there is no key yet; `shared` outlives the next one."""
        return (self._shared if shared else self._own).fresh_url()

    def kill(self) -> None:
        self._shared.kill()
        self._own.kill()


class SentinelServers:
    """Two servers, of which one is the master, and a Sentinel that makes the other so at need."""

    def __init__(self, folder: Path) -> None:
        options = ("--repl-diskless-sync-delay", "0", "--databases", str(DATABASES))
        self.servers = [Valkey(folder / f"server-{at}", *options) for at in range(2)]
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.servers[0].port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 1000\n"
            f"sentinel failover-timeout {SERVICE} 5000\n"
        )
        self.sentinel = Valkey(folder / "sentinel")
        self._nobody = free_port()  # a Sentinel that was lost
        self.sentinel.arguments = [
            *(str(config), "--sentinel"),
            *("--port", str(self.sentinel.port), "--bind", "127.0.0.1"),
        ]
        self._count = 0

    @property
    def url(self) -> str:
        sentinels = f"127.0.0.1:{self._nobody},127.0.0.1:{self.sentinel.port}"
        return f"redis+sentinel://{sentinels}/{SERVICE}"

    def start(self) -> None:
        """Start all; return when the Sentinel knows the replica, so that a failover can succeed."""
        master, replica = [server.start() for server in self.servers]
        replica.call("REPLICAOF", "127.0.0.1", master.port)
        wait_for(lambda: "master_link_status:up" in replica.call("INFO", "replication"), "replica")
        self.sentinel.start()
        wait_for(lambda: "slaves=1" in self.sentinel.call("INFO", "sentinel"), "Sentinel's view")

    @property
    def master(self) -> Valkey:
        """The server that is written to, as the Sentinel has it."""
        _, port = self.sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def fresh_url(self, *, shared: bool = False) -> str:
        """Where there is no key yet; `shared` outlives the next one."""
        self._count += 1
        return f"{self.url}/{self._count}"

    def kill(self) -> None:
        self.sentinel.kill()
        for server in self.servers:
            server.kill()


async def on_primaries(client: Any, *command: str | int) -> None:
    """Run a command on the server, or on each that is written to."""
    if isinstance(client, BoundedCluster):
        for node in await client.primaries():
            await client.execute_command(*command, target_nodes=node)
    else:
        await client.execute_command(*command)


Servers = SingleServer | TwoClusters | SentinelServers
KINDS: dict[str, type[Servers]] = {
    "single": SingleServer,
    "cluster": TwoClusters,
    "sentinel": SentinelServers,
}
