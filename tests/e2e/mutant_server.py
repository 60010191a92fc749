"""Our launcher with one mistake in it: a verify window's KV goes one slot too far. The suite must see it."""

import sys

import sglang_ssd  # noqa: F401 - prepares the host
from sglang_ssd.scheduler import verifier

_enter_verify = verifier._enter_verify


def _shifted(batch, tokens, positions) -> None:
    _enter_verify(batch, tokens, positions)
    if tokens.shape[1] > 1:
        batch.out_cache_loc = batch.out_cache_loc.view(positions.shape).roll(1, dims=1).reshape(-1)


# At module level: SGLang spawns its scheduler, and a spawned process runs this module again.
verifier._enter_verify = _shifted

if __name__ == "__main__":
    from sglang_ssd.launch_server import main

    sys.exit(main())
