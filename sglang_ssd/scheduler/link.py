"""From the options that came with the server arguments to a running link."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ssd.config import SSDConfig
from sglang_ssd.policy.deadline import Deadline
from sglang_ssd.policy.rounds import RoundPolicy
from sglang_ssd.protocol import PROTOCOL_VERSION, Hello
from sglang_ssd.scheduler.draft_client import DraftClient
from sglang_ssd.tokenizers import load_fingerprint

logger = logging.getLogger(__name__)

ATTRIBUTE = "_ssd"
"""The private attribute of SGLang's ServerArgs that carries our options into the scheduler process."""


@dataclass(frozen=True)
class SchedulerOptions:
    """What the launcher tells the scheduler: our config, where the draft server listens, what the target is called."""

    config: SSDConfig
    endpoint: str | None
    target: str

    @classmethod
    def of(cls, server_args: Any) -> SchedulerOptions:  # noqa: ANN401 - sglang's ServerArgs
        """The options that travel on ``server_args``; the defaults when SGLang was started without our launcher."""
        carried: Mapping[str, Any] = getattr(server_args, ATTRIBUTE, None) or {}
        config = SSDConfig(**carried.get("config", {}))
        endpoint = carried.get("endpoint") or config.endpoint
        return cls(config, endpoint, str(carried.get("target") or server_args.model_path))

    def deadline(self) -> Deadline:
        """How long rounds wait. ``wait=full`` is for repeatable tests: its deadline is off."""
        cap_s = None if self.config.deadline_ms is None else self.config.deadline_ms / 1e3
        return Deadline(cap_s=cap_s, patient=self.config.wait == "full")

    def policy(self, num_steps: int) -> RoundPolicy:
        """What decides about K and fallbacks. The baseline ``sync`` and repeatable tests take K as it is given."""
        config = self.config
        fallback = (
            "jit" if config.mode == "sync" or (config.wait == "full" and config.fallback == "auto") else config.fallback
        )
        kinds = frozenset(("jit", "ngram", "none")) if fallback == "auto" else frozenset((fallback,))
        adaptive = config.lookahead == "auto" and config.mode == "ssd" and config.wait == "auto"
        return RoundPolicy(num_steps, kinds, adaptive=adaptive)

    def describe(self) -> dict[str, object]:
        """The part of ``/ssd/status`` that never changes."""
        return {
            "target": self.target,
            "mode": self.config.mode,
            "verify": self.config.verify,
            "wait": self.config.wait,
            "fallback": self.config.fallback,
            "fan_out": self.config.fan_out,
            "planner": self.config.planner,
            "endpoint": self.endpoint,
        }


def connect(options: SchedulerOptions, server_args: Any, *, vocab_size: int, num_steps: int) -> DraftClient | None:  # noqa: ANN401
    """Start the link of this process; None when there is no draft server to talk to."""
    if options.endpoint is None:
        logger.warning("SSD: no draft server; give --speculative-ssd-endpoint or start with sglang_ssd.launch_server.")
        return None
    config = options.config
    hello = Hello(
        version=PROTOCOL_VERSION,
        vocab_size=vocab_size,
        fingerprint=_fingerprint(server_args),
        num_steps=num_steps,
        verify=config.verify,
        mode=config.mode,
        wait=config.wait,
        fan_out=config.fan_out,
        target=options.target,
        support=config.rejection_support,
        saguaro_c=config.saguaro_c,
        planner=config.planner,
    )
    return DraftClient(options.endpoint, hello)


def _fingerprint(server_args: Any) -> str:  # noqa: ANN401
    if server_args.skip_tokenizer_init:
        return ""
    path = server_args.tokenizer_path or server_args.model_path
    return load_fingerprint(path, trust_remote_code=bool(server_args.trust_remote_code))
