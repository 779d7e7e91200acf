"""What a person reads once the fleet can be asked: what to paste, and how to end it."""

import json
import shlex
from collections.abc import Sequence


def ready_text(urls: Sequence[str], *, model: str, state: str) -> str:
    """What to do now, ready to paste."""
    url = urls[0]
    also = f" (also {', '.join(urls[1:])})" if len(urls) > 1 else ""
    body = json.dumps(
        {
            "model": model,
            "stream": True,
            "temperature": 0,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        },
        ensure_ascii=False,
    )
    return f"""
Millstream is ready at {url}{also}

  Open it in a browser to chat; {url}/fleet shows the fleet.

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}

  Python: openai.OpenAI(base_url="{url}/v1", api_key="none")

Ctrl-C stops it. {state}
"""
