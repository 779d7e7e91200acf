"""The protocol against its model: any order of steps by any number of workers, on a real Valkey."""

import asyncio
import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.support.faults import busy
from tests.support.protocol_model import Protocol

from millstream.shared.connection import open_redis

EXAMPLES = int(os.environ.get("PROTOCOL_MODEL_EXAMPLES", "60"))  # nightly: 10000


@pytest.mark.timeout(int((30 + EXAMPLES * 0.4) * busy()))
def test_any_order_of_steps(redis_url: str) -> None:
    with asyncio.Runner() as runner:
        Protocol.loop = runner.get_loop()
        context = open_redis(redis_url)
        Protocol.client = runner.run(context.__aenter__())
        run_state_machine_as_test(
            Protocol,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],  # shrinking takes minutes; the steps are short anyway
            ),
        )
        runner.run(context.__aexit__(None, None, None))
