"""OpenAI's headers on how a caller stands with its limits."""

import math

from millstream.shared.limits import Standing

RATE_HEADERS = [
    f"x-ratelimit-{what}-{of}"
    for what in ("limit", "remaining", "reset")
    for of in ("requests", "tokens")
]


def rate_headers(standing: Standing) -> dict[str, str]:
    """OpenAI's headers on how a caller stands; none for limits that it does not have."""
    headers: dict[str, str] = {}
    for name, window in (("requests", standing.requests), ("tokens", standing.tokens)):
        if window is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(window.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(window.remaining)
            headers[f"x-ratelimit-reset-{name}"] = _duration(window.reset_s)
    return headers


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `1m0s`, `59.5s`, `120ms`."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
