"""Engines by their names, and what is missing for one."""

import sys

import pytest
from tests.support.fake_running import SETTINGS

from millstream.shared.errors import SettingsError
from millstream.worker.engines.fake import FakeEngine
from millstream.worker.engines.registry import create_engine


class TestRegistry:
    def test_makes_the_fake(self) -> None:
        assert isinstance(create_engine("fake", SETTINGS), FakeEngine)

    def test_knows_no_other_name(self) -> None:
        with pytest.raises(
            SettingsError, match="There is no engine 'vllm'; choose one of: transformers, fake"
        ):
            create_engine("vllm", SETTINGS)

    def test_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # None in sys.modules makes the import fail as for a package that is not there.
        name = "millstream.worker.engines.transformers_engine"
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(SettingsError, match=r"pip install 'millstream\[worker\]'"):
            create_engine("transformers", SETTINGS)
