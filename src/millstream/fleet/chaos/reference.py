"""What an undisturbed run of a request writes: the fake engine's script through a worker's job."""

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.shared.schemas import TaskRequest
from millstream.shared.steps import Claim
from millstream.worker.engines.fake import CONTEXT_LENGTH
from millstream.worker.engines.fake_script import FakeTokenizer, read_script
from millstream.worker.job import Job, Limits


@dataclass(frozen=True, slots=True)
class Reference:
    """The whole log of a task as it would be without any fault."""

    events: Sequence[tuple[str, str]]
    """(ids, data) of the token events, in order."""
    prompt_tokens: int
    tokens: int
    finish_reason: str


def undisturbed(request: TaskRequest, *, max_tokens: int) -> Reference:
    """The reference of a request; a poison task's is what it would say if it lived."""
    tokenizer = FakeTokenizer()
    job = Job(Claim(task_id="", attempt=1, request=b"", log=[]), request, 0)
    if request.prompt is not None:
        prompt_ids = tokenizer.encode(request.prompt)
    else:
        prompt_ids = tokenizer.encode_chat(request.messages)
    generation = job.begin(prompt_ids, tokenizer, Limits(CONTEXT_LENGTH, max_tokens))
    if generation is not None:
        script = read_script(prompt_ids, generation.seed)
        for position in range(generation.max_new_tokens):
            if job.outcome or position >= script.tokens:
                break
            last = position + 1 == generation.max_new_tokens
            job.advance([script.token_at(position)], "length" if last else None)
        job.advance([], "stop")
    row = job.row(CONTEXT_LENGTH)
    return Reference(
        events=row.events,
        prompt_tokens=row.prompt_tokens,
        tokens=sum(1 for ids, _ in row.events if ids),
        finish_reason=row.detail,
    )
