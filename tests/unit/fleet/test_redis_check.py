"""What is refused and what is only named in a given Redis."""

import pytest

from millstream.fleet.redis_check import mask_password, policy_warnings, refuse_old
from millstream.shared.errors import SettingsError


@pytest.mark.parametrize("version", ["6.2.14", "5.0.0", "unknown", ""])
def test_old_redis_is_refused(version: str) -> None:
    with pytest.raises(SettingsError, match=r"needs Redis >= 7 or Valkey"):
        refuse_old({"redis_version": version}, "redis://h")


def test_new_redis_and_any_valkey_are_fine() -> None:
    refuse_old({"redis_version": "7.0.0"}, "redis://h")
    refuse_old({"redis_version": "8.4.0"}, "redis://h")
    refuse_old({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, "redis://h")


def test_eviction_is_warned_of() -> None:
    assert policy_warnings("noeviction") == []
    assert "allkeys-lru" in policy_warnings("allkeys-lru")[0]


def test_passwords_are_masked() -> None:
    assert mask_password("redis://h:1/0") == "redis://h:1/0"
    assert mask_password("redis://:p@h:1/0") == "redis://:***@h:1/0"
    assert mask_password("rediss://me:p%40@h") == "rediss://me:***@h"
