"""What SGLang loads in every process of a server (entry point ``sglang.srt.plugins``)."""

from __future__ import annotations

import logging
import pkgutil
from importlib.metadata import version

from sglang_ssd import cpu, processes
from sglang_ssd.hooks import all_hooks
from sglang_ssd.surfaces import SURFACES

logger = logging.getLogger(__name__)

SUPPORTED_SGLANG = "0.5.23"


def activate() -> None:
    """Register the algorithm and the hooks in this process. Safe to call again."""
    processes.end_if_orphaned()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_ssd.scheduler.algorithm import NAME, SSDAlgorithm

    if get_spec(NAME) is not None:
        return
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=SSDAlgorithm)(_worker_class)
    for hook in all_hooks():
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    if not cpu.has_gpu():
        _serve_on_cpu()


def check_compatibility() -> list[str]:
    """What this SGLang lacks that we use, one sentence each; empty when all is there."""
    found = version("sglang")
    problems = []
    if found != SUPPORTED_SGLANG:
        problems.append(f"sglang {found} is installed; install sglang=={SUPPORTED_SGLANG}.")
    wanted = {hook.target: hook.reason for hook in all_hooks()}
    wanted |= {symbol: purpose for purpose, symbols in SURFACES.items() for symbol in symbols}
    problems += [
        f"This SGLang has no {symbol} ({purpose.rstrip('.')}); install sglang=={SUPPORTED_SGLANG}."
        for symbol, purpose in wanted.items()
        if not _exists(symbol)
    ]
    return problems


def _exists(symbol: str) -> bool:
    try:
        pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError):
        return False
    return True


def _worker_class(_server_args: object) -> type:
    from sglang_ssd.scheduler.worker import SSDWorker

    return SSDWorker


def _serve_on_cpu() -> None:
    """Register the CPU attention backend that can verify under the name of the one that cannot."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("torch_native")(_cpu_attention_backend)
    logger.info("SSD: no GPU here; serving on the CPU with a stand-in for sgl_kernel and torch_native attention.")


def _cpu_attention_backend(runner: object) -> object:
    from sglang_ssd.cpu.attention import VerifyingTorchNativeBackend

    return VerifyingTorchNativeBackend(runner)
