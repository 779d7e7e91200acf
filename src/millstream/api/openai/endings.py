"""What OpenAI's forms say of the end of an answer: why it ended, and its usage."""

from collections.abc import Sequence

from millstream.shared.states import FinishReason

# OpenAI's clients know a closed set; the native routes tell the reason itself.
_WORDS = {FinishReason.LOW_CONFIDENCE: FinishReason.STOP}


def finish_reason_of(reason: str) -> str:
    """A finish reason in OpenAI's words."""
    return _WORDS.get(FinishReason(reason), reason)


def sum_usage(usages: Sequence[dict[str, int]], *, prompts: int = 1) -> dict[str, int]:
    """Tokens of all choices together; a prompt that several of them share counts once.

    Args:
        usages: The choices' own; those of one prompt follow each other.
        prompts: How many prompts there are; each has as many choices.
    """
    a_prompt = len(usages) // prompts
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages[::a_prompt])
    completion_tokens = sum(usage["completion_tokens"] for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
