"""What is written down of how likely tokens were."""

import json

from millstream.worker.engines.base import EngineSettings, TokenLogprobs
from millstream.worker.engines.registry import create_engine
from millstream.worker.logprobs import LogprobWriter


def test_a_token_that_a_filter_finds_is_no_alternative() -> None:
    tokenizer = create_engine("fake", EngineSettings(model="m", source="fake")).tokenizer
    ids = tokenizer.encode("one two three")
    texts = [tokenizer.token_bytes(token_id).decode() for token_id in ids]
    likely = TokenLogprobs(-0.5, tuple((token_id, -1.0) for token_id in ids))

    def told(writer: LogprobWriter) -> list[str]:
        (token,) = json.loads(writer.write([ids[1]], [likely]))
        assert token["token"] == texts[1]  # what came, the filter has let pass
        return [other["token"] for other in token["top_logprobs"]]

    assert told(LogprobWriter(tokenizer)) == texts
    writer = LogprobWriter(tokenizer, lambda text: text.strip() != "two")
    for _ in range(2):  # also from memory
        assert told(writer) == [text for text in texts if text.strip() != "two"]
