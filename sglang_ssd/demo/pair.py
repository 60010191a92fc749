"""The demo pair: SmolLM2-135M-Instruct as the target, and what drafts for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from sglang_ssd.demo.cache import Build, cache_home, make_once
from sglang_ssd.demo.draft import content_id, join_draft, shipped_weights
from sglang_ssd.demo.source import DemoError, demo_gguf

logger = logging.getLogger(__name__)

TARGET_NAME = "SmolLM2-135M-Instruct"
_RECIPE = 1
"""Part of the directories' names: another way of making them makes them anew."""


@dataclass(frozen=True)
class DemoPair:
    """Two checkpoint directories. ``stand_in``: there is no small draft, ``draft`` is the target itself."""

    target: Path
    draft: Path
    stand_in: bool


def demo_pair(progress: bool = True) -> DemoPair:
    """The demo pair in the user's cache directory, made at the first call (93 MB are fetched).

    Raises DemoError, whose message says how to provide the weights by hand.
    """
    target = _made(TARGET_NAME, lambda directory: _write_target(directory, progress=progress))
    weights = shipped_weights()
    if weights is None:
        logger.warning(
            "No trained demo draft is in this package: %s drafts for itself, a stand-in that shows how "
            "speculation works but saves no time.",
            TARGET_NAME,
        )
        return DemoPair(target, draft=target, stand_in=True)
    name = f"{TARGET_NAME}-draft-{content_id(weights)}"
    draft = _made(name, lambda directory: join_draft(weights, target, directory))
    logger.info("The demo's own draft, distilled from %s, drafts for it: %s.", TARGET_NAME, draft.name)
    return DemoPair(target, draft, stand_in=False)


def _write_target(directory: Path, *, progress: bool) -> None:
    from sglang_ssd.demo.checkpoint import write_checkpoint

    logger.info("Making the demo model in %s (once).", directory.parent)
    with demo_gguf(progress=progress) as gguf_file:
        write_checkpoint(gguf_file, directory, progress=progress)


def _made(name: str, build: Build) -> Path:
    directory = cache_home() / "demo" / f"{name}-r{_RECIPE}"
    try:
        return make_once(directory, build)
    except OSError as error:
        raise DemoError(
            f"The demo model could not be made in {directory.parent} ({error}). "
            "It needs 0.4 GB there, or set XDG_CACHE_HOME to another directory."
        ) from error
