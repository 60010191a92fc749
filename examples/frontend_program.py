"""An SGLang frontend program against the server: gen, select and fork.

python examples/frontend_program.py [http://127.0.0.1:30000]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import sglang_ssd  # noqa: F401 - first: it makes sglang importable where there is no GPU

import sglang as sgl  # isort: skip

if TYPE_CHECKING:
    from sglang.lang.interpreter import ProgramState

SIDES = ("for", "against")


@sgl.function
def debate(s: ProgramState, topic: str, max_tokens: int) -> None:
    s += f"A short debate about {topic}.\n"
    branches = s.fork(len(SIDES))  # both continue the same prefix, at the same time
    for branch, side in zip(branches, SIDES, strict=True):
        branch += f"One argument {side} it: " + sgl.gen("argument", max_tokens=max_tokens, temperature=0, stop="\n")
    for branch, side in zip(branches, SIDES, strict=True):
        s += f"{side}: {branch['argument']}\n"
    s += "The better argument is the one " + sgl.select("winner", choices=list(SIDES))
    s += " it, because " + sgl.gen("reason", max_tokens=max_tokens, temperature=0, stop="\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run a frontend program on the server.")
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:30000")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args(argv)

    backend = sgl.RuntimeEndpoint(arguments.base_url)
    state = debate.run(topic="tea", max_tokens=arguments.max_tokens, backend=backend)
    print(state.text())
    print("winner:", state["winner"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
