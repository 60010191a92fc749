"""The openai client against the server: one plain answer, one streamed, and one without speculation.

    python examples/openai_client.py [http://127.0.0.1:30000]

The three answers are the same: speculation changes the speed, not the text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from openai import OpenAI

Request = dict[str, Any]

MESSAGES = [{"role": "user", "content": "Explain in two sentences what a cache is."}]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Chat with the server through the openai client.")
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:30000")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args(argv)

    client = OpenAI(base_url=f"{arguments.base_url}/v1", api_key="none")
    request: Request = {
        "model": client.models.list().data[0].id,
        "messages": MESSAGES,
        "max_tokens": arguments.max_tokens,
        "temperature": 0,
    }
    print("plain:   ", plain(client, request))
    print("streamed:", streamed(client, request))
    print("off:     ", plain(client, {**request, "extra_body": {"custom_params": {"ssd": {"enabled": False}}}}))
    return 0


def plain(client: OpenAI, request: Request) -> str:
    answer = client.chat.completions.create(**request)
    return answer.choices[0].message.content or ""


def streamed(client: OpenAI, request: Request) -> str:
    chunks = client.chat.completions.create(**request, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


if __name__ == "__main__":
    sys.exit(main())
