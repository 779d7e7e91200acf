"""What a person reads once the fleet can be asked: what to paste, and how to end it."""

import json
import shlex
from collections.abc import Sequence


def ready_text(urls: Sequence[str], *, model: str, keyed: bool, state: str) -> str:
    """What to do now, ready to paste.

    Args:
        urls: The pods'.
        model: Of whom to ask.
        keyed: Whether a key is asked for; the text has a place for it, never one itself.
        state: Where tasks are kept.
    """
    url = urls[0]
    header = ' -H "Authorization: Bearer $MILLSTREAM_API_KEY"' if keyed else ""
    needed = (
        "  It asks for a key: put yours into MILLSTREAM_API_KEY; `millstream keys add` makes one.\n"
        if keyed
        else ""
    )
    given = 'os.environ["MILLSTREAM_API_KEY"]' if keyed else '"none"'
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
    quoted = shlex.quote(body)
    return f"""
Millstream is ready at {url}{also}

  Open it in a browser to chat; {url}/fleet shows the fleet.
{needed}
  curl -sSN {url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d {quoted}

  Python: openai.OpenAI(base_url="{url}/v1", api_key={given})

Ctrl-C stops it. {state}
"""
