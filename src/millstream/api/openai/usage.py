"""The usage of an answer that several tasks made."""

from collections.abc import Sequence


def sum_usage(usages: Sequence[dict[str, int]], *, prompts: int = 1) -> dict[str, int]:
    """Tokens of all choices together; a prompt that several of them share counts once.

    Args:
        usages: The choices' own, in their order: all choices of the first prompt come first.
        prompts: How many different prompts there are; each has as many choices.
    """
    a_prompt = len(usages) // prompts
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages[::a_prompt])
    completion_tokens = sum(usage["completion_tokens"] for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
