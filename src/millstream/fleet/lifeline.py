"""Keeps processes from outliving the one that started them, whatever that one dies of.

Two small programs, run by path under `python -I -S`: they start in 20 ms, stay at 9 MB, and import
nothing outside the standard library.

`hold PARENT COMMAND…` asks the kernel for a SIGTERM on the parent's death, then becomes COMMAND, so
the process keeps its id. That costs nothing while it runs, but on Linux alone, and a stopped or a
hanging process ignores it.

`guard MARK GRACE_S [COMMAND…]` is the second line, and does what a signal cannot. It reads process
ids (`+123`, `-123`) from a pipe whose other end only the parent holds. When the pipe closes, it
lets those processes drain for GRACE_S, kills what is left of their groups and every process marked
with MARK, and then ends COMMAND, its own child, with SIGTERM. COMMAND is the embedded Valkey: it
goes last, so that draining workers can still hand their tasks over, and not by SIGKILL, so that its
log is flushed. If the guard is the one that is killed, the kernel ends COMMAND.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection

MARK = "_MILLSTREAM_FLEET"
"""The environment variable by which the processes of one fleet are known, theirs included."""

DATABASE_GRACE_S = 10.0
"""Valkey flushes its log at SIGTERM: at most a second's data, on however slow a disk."""

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_SETTLE_S = 2.0


def main(arguments: list[str]) -> int:
    """Run one of the two programs."""
    match arguments:
        case ["hold", parent, *command] if command:
            return hold(int(parent), command)
        case ["guard", mark, grace_s, *command]:
            return guard(mark, float(grace_s), command)
        case _:
            return 2


def hold(parent: int, command: list[str]) -> int:
    """Become the command, and get a SIGTERM when the parent dies; returns where it is too late."""
    _die_with_parent()
    # It may have died before the kernel was asked.
    if os.getppid() != parent:
        return 1
    # Python ignores SIGPIPE, and an ignored signal stays ignored after exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return os.execv(command[0], command)  # noqa: S606 - this is what the program is for


def guard(mark: str, grace_s: float, command: list[str]) -> int:
    """Watch over the processes named on stdin, and over the command; see the module's text."""
    # Handlers rather than SIG_IGN, which the command would inherit. The guard ends by its pipe
    # alone: `pkill millstream` reaches the parent too, which drains first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    child = _start(command) if command else None
    leaders: set[int] = set()
    unread = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 512)
            if child is not None and (code := _reap(child)) is not None:
                return code
        if 0 in readable:
            data = os.read(0, 4096)
            if not data:
                break
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                change = leaders.add if line.startswith(b"+") else leaders.discard
                change(int(line[1:]))

    spared = [os.getpid()] if child is None else [os.getpid(), child]
    if child is not None:
        send(child, signal.SIGCONT)
    # A second SIGTERM would force the exit of a process that already drains after the kernel's.
    end_groups(leaders, grace_s, send_term=not _LINUX)
    kill_marked(mark, spared)
    if child is not None:
        _end_child(child)
    return 0


def end_groups(leaders: Collection[int], grace_s: float, *, send_term: bool) -> None:
    """Let the processes drain, then kill all that is left in their groups."""
    for leader in leaders:
        if send_term:
            send(leader, signal.SIGTERM)
        # A stopped process acts on nothing else.
        send(leader, signal.SIGCONT)
    _wait_for_end(leaders, grace_s)
    for leader in leaders:
        kill_group(leader)
    _wait_for_end(leaders, _SETTLE_S)


def kill_marked(mark: str, spared: Collection[int]) -> set[int]:
    """Kill every process that carries the mark, those that left their group included."""
    killed: set[int] = set()
    # Again, since a process may have forked while the list was made.
    while strays := marked(mark) - killed - set(spared):
        for pid in strays:
            send(pid, signal.SIGKILL)
        killed |= strays
    _wait_for_end(killed, _SETTLE_S)
    return killed


def marked(mark: str) -> set[int]:
    """The processes started with this mark (Linux; empty elsewhere)."""
    wanted = f"{MARK}={mark}".encode()
    found: set[int] = set()
    if not _LINUX:
        return found
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
                if wanted in environment.read().split(b"\0"):
                    found.add(int(name))
    return found


def guarded(mark: str) -> bool:
    """Whether a guard of this mark lives, which will end its fleet (Linux; true elsewhere)."""
    if not _LINUX:
        return True
    for pid in marked(mark):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as words:
            if b"guard" in words.read().split(b"\0"):
                return True
    return False


def alive(pid: int) -> bool:
    """Whether the process still runs; a zombie that nobody waits for does not."""
    if _LINUX:
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                return stat.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
        except OSError:
            return False
    return send(pid, 0)


def send(pid: int, number: int) -> bool:
    """Send a signal; False where there is nobody to get it."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_group(leader: int) -> None:
    """Kill a process and all that it forked in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _wait_for_end(pids: Collection[int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _start(command: list[str]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            os._exit(hold(parent, command))
        finally:
            os._exit(127)
    return pid


def _reap(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _end_child(child: int) -> None:
    os.kill(child, signal.SIGTERM)
    os.kill(child, signal.SIGCONT)
    deadline = time.monotonic() + DATABASE_GRACE_S
    while _reap(child) is None:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(_POLL_S)


def _die_with_parent() -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
