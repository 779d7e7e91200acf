"""A real browser that runs one page of a test and reports what it saw."""

import asyncio
import json
import os
import shutil
import signal
import tempfile
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

_PAGE = """<!doctype html><meta charset="utf-8"><script type="module">
const report = value => fetch("/report", {method: "POST", body: JSON.stringify(value)});
try { report({value: await (async () => {
%s
})()}); } catch (error) { report({error: String(error.stack)}); }
</script>"""


class Browser:
    """Serves the page, starts the browser on it, and waits for what the page returns."""

    def __init__(self, script: str) -> None:
        self._page = (_PAGE % script).encode()
        self._report: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.origin = ""

    async def run(self, within_s: float = 25) -> Any:
        """What the page's script returns; its error is raised here."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            process = await asyncio.create_subprocess_exec(
                CHROMIUM or "",
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", "--disable-background-networking", "--disable-extensions"),
                f"--user-data-dir={profile}",
                self.origin,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(within_s):
                    report = await self._report
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                server.close()
        assert "error" not in report, report["error"]
        return report["value"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            body = b""
            if head.startswith("POST /report"):
                lines = dict(
                    line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line
                )
                body = await reader.readexactly(int(lines["content-length"]))
            found = head.startswith(("GET / ", "POST /report"))
            page = self._page if head.startswith("GET / ") else b""
            status = b"200 OK" if found else b"404 Not Found"
            writer.write(
                b"HTTP/1.1 %s\r\ncontent-type: text/html\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%s" % (status, len(page), page)
            )
            await writer.drain()
            if body and not self._report.done():
                self._report.set_result(json.loads(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
