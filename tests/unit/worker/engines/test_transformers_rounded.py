"""Where values are rounded, so that last digits count: a failover changes no bit."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.transformers_kernels import where_packed
from tests.support.transformers_running import started
from tests.support.transformers_tiny import write_tiny_model

pytestmark = pytest.mark.timeout(120)


@where_packed("int8", "bfloat16")
async def test_an_answer_that_was_interrupted_goes_on_with_the_same_bits(tmp_path, dtype):
    """Another worker reads at once what the first wrote token by token."""
    folder = write_tiny_model(tmp_path, eos=None)
    prompt = list(range(10, 90))
    asked = {"prompt_length": len(prompt), "seed": 3, "temperature": 0.9, "logprobs": 2}
    async with started(folder, dtype=dtype, device="cpu") as running:
        whole = await running.run("whole", prompt, max_new_tokens=48, **asked)
        told = [each for output in running.outputs("whole") for each in output.logprobs]
        for done in range(1, 48, 6):
            running.submit(f"{done}", prompt + whole[:done], max_new_tokens=48 - done, **asked)
        for done in range(1, 48, 6):
            await running.finished(f"{done}")
            assert running.tokens(f"{done}") == whole[done:]
            later = [each for output in running.outputs(f"{done}") for each in output.logprobs]
            assert later == told[done:]
