"""Which pages may ask a fleet without keys: not those of strangers, by any trick of names."""

import pytest

from millstream.api.auth.pages import Pages
from millstream.shared.errors import NotAllowed


def refusal(origins: str, **headers: str) -> str | None:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        Pages(origins).check(given)
    except NotAllowed as error:
        return error.code
    return None


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]",
     "192.168.1.5:8000", "8.8.8.8", "api:8000", "testserver", "host.docker.internal:8000",
     "mill.localhost:1", "gpu.local", "mill.default.svc:80", "localhost.", ""],
)  # fmt: skip
def test_own_names(host: str) -> None:
    assert refusal("auto", host=host) is None
    assert refusal("auto", host=host, origin=f"http://{host}") is None or host == ""


@pytest.mark.parametrize(
    "host",
    ["evil.example:8000", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io",
     "127.0.0.1.evil.example:8000", "evil.example:8000:1", "[::1", "[evil.example]", "a@b.c",
     "internal.evil.example.", "local.", "2130706433.com", "\xe9.example"],
)  # fmt: skip
def test_names_that_a_stranger_could_have_pointed_here(host: str) -> None:
    """DNS rebinding: the page is of its own origin, and its name leads to us by now."""
    expected = None if host == "local." else "host_not_allowed"
    assert refusal("auto", host=host) == expected
    assert refusal("none", host=host) == expected
    assert refusal("*", host=host) is None


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1:5173", True),
        ("http://[::1]:3000", True),
        ("http://192.168.1.7", True),
        ("http://mill.local", True),
        ("http://dev:3000", True),
        ("https://evil.example", False),
        ("http://203.0.113.9.evil.example", False),
        ("http://8.8.8.8", False),  # anyone may have a page at an address
        ("null", False),  # what a frame in a sandbox says, on any page
        ("http://localhost.evil.example", False),
        ("http://localhost:3000@evil.example", False),
        ("", False),
        ("http://", False),
    ],
)
def test_pages_of_other_origins(origin: str, allowed: bool) -> None:
    told = refusal("auto", host="localhost:8000", origin=origin)
    assert told == (None if allowed else "origin_not_allowed")


def test_those_that_were_named() -> None:
    origins = "https://chat.example, https://two.example:8443"
    assert refusal(origins, host="localhost", origin="https://chat.example") is None
    assert refusal(origins, host="localhost", origin="https://two.example:8443") is None
    assert refusal(origins, host="localhost", origin="https://two.example") == "origin_not_allowed"
    assert refusal(origins, host="localhost:1", origin="http://localhost:3000")
    assert refusal(origins, host="localhost:1", origin="http://localhost:1") is None
    # Behind a proxy under that name.
    assert refusal(origins, host="chat.example", origin="https://chat.example") is None
    assert refusal(origins, host="evil.example") == "host_not_allowed"
    assert refusal("none", host="localhost:1", origin="http://localhost:3000")
    assert refusal("none", host="localhost:1", origin="http://localhost:1") is None
    assert refusal("*", host="evil.example", origin="https://evil.example") is None


def test_what_a_strange_page_embeds() -> None:
    """Images and scripts have no origin; a GET that makes a task is theirs to send."""
    image = {"host": "localhost", "sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}
    assert refusal("auto", **image) == "origin_not_allowed"
    assert refusal("auto", **image | {"sec_fetch_site": "same-origin"}) is None
    assert refusal("auto", **image | {"sec_fetch_mode": "navigate"}) is None
    assert refusal("*", **image) is None
