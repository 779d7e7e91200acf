"""WebSockets as uvicorn speaks them, with the means to drop one whose client takes nothing."""

import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from millstream.api.http import CUT, reset

# uvicorn would log each connection with its query, and a ticket may be in that.
_logger = logging.getLogger(__name__)
_logger.setLevel(logging.WARNING)


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol. One message at a time is read, and no more until the route has it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.logger = _logger

    def handle_connect(self, event: Request) -> None:
        """Begin; the route runs later, so its scope can still be added to."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope.setdefault("extensions", {})[CUT] = {"now": self._cut}

    def _cut(self) -> None:
        reset(self.transport)
