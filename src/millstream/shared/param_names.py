"""What callers call the parts of a request, each in its form of the API."""

from millstream.shared.schemas import TaskRequest


def prompt_param(request: TaskRequest) -> str:
    """The field that holds what the model reads."""
    if request.response is not None:
        return "input"
    return "messages" if request.messages else "prompt"


def length_param(request: TaskRequest) -> str:
    """The field that bounds what the model writes."""
    return "max_tokens" if request.response is None else "max_output_tokens"


def asked_param(request: TaskRequest, param: str | None) -> str | None:
    """What the caller called a part of the request that an engine or its tokenizer names."""
    match param:
        case "messages" | "prompt":
            return prompt_param(request)
        case "max_tokens":
            return length_param(request)
        case _:
            return param
