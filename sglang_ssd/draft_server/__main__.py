"""``python -m sglang_ssd.draft_server``: load the model, open the socket, serve until told to stop."""

from __future__ import annotations

import ctypes
import gc
import logging
import secrets
import signal
import sys
from pathlib import Path

import setproctitle

from sglang_ssd.config import MAX_NUM_STEPS, ConfigError
from sglang_ssd.draft_server.engine import DraftEngine
from sglang_ssd.draft_server.server import DraftServer, Offer
from sglang_ssd.draft_server.settings import DraftSettings
from sglang_ssd.draft_server.socket import Door
from sglang_ssd.draft_server.suffixes import Past
from sglang_ssd.tokenizers import load_fingerprint

logger = logging.getLogger("sglang_ssd.draft_server")

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Exit status: 0 when told to stop, 2 when the settings cannot work."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s draft] %(message)s", stream=sys.stderr)
    setproctitle.setproctitle("sglang-ssd::draft")
    try:
        settings = DraftSettings.parse(sys.argv[1:])
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if settings.parent_pipe is not None:
        _die_with_parent()
    serve(settings)
    return 0


def serve(settings: DraftSettings) -> None:
    """Returns when the process is told to stop, or when its parent is gone."""
    engine = load_engine(settings)
    offer = Offer(
        boot=secrets.randbits(62) + 1,
        draft=Path(settings.model_path).name,
        fingerprint=load_fingerprint(settings.model_path),
        max_sessions=settings.max_sessions,
    )
    door = Door(settings.endpoint, offer.boot, settings.parent_pipe)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: door.stop())
    limits = engine.limits
    logger.info(
        "ready at %s: %s on %s, %d KV slots, context %d",
        settings.endpoint, offer.draft, settings.device, limits.slots, limits.context_length,
    )  # fmt: skip
    gc.freeze()
    gc.disable()  # with a million tree nodes a collection takes as long as a round, so it waits until there is time
    try:
        DraftServer(engine, door, offer, past=load_past(settings)).run(when_idle=gc.collect)
    finally:
        door.close()


def load_engine(settings: DraftSettings) -> DraftEngine:
    """The engine that ``settings`` ask for; only that one is imported."""
    if settings.engine == "torch":
        from sglang_ssd.draft_server.engine_torch import TorchEngine

        return TorchEngine(settings.for_engine())
    from sglang_ssd.draft_server.engine_sglang import SGLangEngine

    engine: DraftEngine = SGLangEngine(settings.for_engine())
    return engine


def load_past(settings: DraftSettings) -> Past | None:
    """What remembers ended texts: SGLang's corpus, with SGLang's engine."""
    if settings.engine == "torch":
        return None
    from sglang_ssd.draft_server.ngram_sglang import SharedPast

    return SharedPast(MAX_NUM_STEPS)


def _die_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the thread that started us ends, which even a SIGKILL of it brings about."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
