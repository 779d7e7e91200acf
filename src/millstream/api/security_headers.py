"""The headers that hold a browser back, on every answer: pages, errors and streams too."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# nosniff: an answer is what it says it is, never a script. no-referrer: no task id, and no ticket,
# goes to other sites with a link. DENY and same-origin: nobody frames or embeds what is here.
ALWAYS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
# Unless the answer says otherwise: nobody keeps it, and shown as a page it could do nothing.
UNLESS_SAID: tuple[tuple[bytes, bytes], ...] = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
# What /docs and /redoc load.
_DOCS_POLICY = (
    b"default-src 'none'; script-src 'unsafe-inline' https://cdn.jsdelivr.net; "
    b"style-src 'unsafe-inline' https://cdn.jsdelivr.net https://fonts.googleapis.com; "
    b"font-src https://fonts.gstatic.com; img-src data: https://fastapi.tiangolo.com "
    b"https://cdn.redoc.ly; connect-src 'self'; worker-src blob:; frame-ancestors 'none'"
)
_DOCS = ("/docs", "/redoc")


class SecurityHeaders:
    """ASGI middleware: one look at the first message of an answer, none at the others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, and say a little more."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
                said = {name.lower() for name, _ in headers}
                headers += ALWAYS
                if scope["path"] in _DOCS and b"content-security-policy" not in said:
                    headers.append((b"content-security-policy", _DOCS_POLICY))
                    said.add(b"content-security-policy")
                headers += [pair for pair in UNLESS_SAID if pair[0] not in said]
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, send_with_headers)
