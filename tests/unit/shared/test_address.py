"""The URLs of Redis: what each means, and what is refused."""

import pytest

from millstream.shared.address import Topology, mask_password, parse_address
from millstream.shared.errors import SettingsError
from millstream.shared.settings import read_settings


def test_one_server_is_left_to_redis_py() -> None:
    for url in ("redis://h:1/2", "rediss://:p@h", "unix:///run/redis.sock?db=1"):
        address = parse_address(url)
        assert (address.topology, address.url, address.nodes) == (Topology.SINGLE, url, ())


def test_some_nodes_of_a_cluster() -> None:
    address = parse_address("redis+cluster://me:p%40ss@a:7000,b,[::1]:7002")
    assert address.topology is Topology.CLUSTER
    assert address.nodes == (("a", 7000), ("b", 6379), ("::1", 7002))
    assert address.login == {"username": "me", "password": "p@ss"}


def test_sentinels_have_a_login_of_their_own() -> None:
    address = parse_address(
        "rediss+sentinel://:secret@s1,s2:5000/main/3?sentinel_password=other&ssl_ca_certs=/ca.pem"
    )
    assert address.topology is Topology.SENTINEL
    assert address.nodes == (("s1", 26379), ("s2", 5000))
    assert address.service == "main"
    tls = {"ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert address.login == {"password": "secret", "db": 3, **tls}
    assert address.sentinel_login == {"password": "other", **tls}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://h", "must begin with"),
        ("redis+proxy://h", "must begin with"),
        ("redis+cluster://h/1", "no databases"),
        ("redis+cluster://", "names no host"),
        ("redis+cluster://h:port", "Port could not be cast"),
        ("redis+cluster://h?socket_timeout=5", "socket_timeout"),
        ("redis+sentinel://h", "service's name"),
        ("redis+sentinel://h/main/x", "service's name"),
    ],
)
def test_what_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address(url)


def test_a_refused_url_keeps_its_password_to_itself() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings({"redis_url": "redis+sentinel://me:hush@s1:26379?sentinel_password=hush"})
    assert "redis+sentinel://me:***@s1:26379?sentinel_password=***" in str(caught.value)
    assert "hush" not in str(caught.value)
    assert mask_password("redis+cluster://:p:q@a:1,b:2") == "redis+cluster://:***@a:1,b:2"


def test_the_number_of_shards_follows_the_address() -> None:
    assert read_settings({"redis_url": "redis://h"}).shards == 1
    assert read_settings({"redis_url": "redis+sentinel://h/main"}).shards == 1
    assert read_settings({"redis_url": "redis+cluster://h"}).shards == 4
