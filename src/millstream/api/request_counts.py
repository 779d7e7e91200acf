"""What became of requests, in plain counts."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from millstream.shared.errors import MillstreamError

_METHODS = {"GET", "HEAD", "POST", "DELETE", "OPTIONS"}
_MOUNTED = "/static"


class RequestCounts:
    """Answers and refusals of one pod since its start.

    No label says whose request it was, and each takes few values: routes are templates, not paths.
    """

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str, str]] = Counter()
        """Method, route and status of answers that began."""
        self.refused: Counter[tuple[str, str]] = Counter()
        """Status and error code of refusals, WebSockets among them."""

    def answer(self, scope: Mapping[str, Any], status: int) -> None:
        """The answer to a request begins."""
        method: str = scope["method"]
        known = method if method in _METHODS else "other"
        self.answered[known, _template(scope), str(status)] += 1

    def refuse(self, error: MillstreamError, status: int) -> None:
        """A request is answered with an error."""
        self.refused[str(status), error.code] += 1


def _template(scope: Mapping[str, Any]) -> str:
    path: str | None = getattr(scope.get("route"), "path", None)
    if path is not None:
        return path
    return _MOUNTED if scope["path"].startswith(_MOUNTED + "/") else "none"
