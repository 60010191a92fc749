"""What SGLang loads in every process of a server (entry point ``sglang.srt.plugins``)."""

from __future__ import annotations

import logging
import pkgutil
from importlib.metadata import version

from sglang_ssd import cpu, processes
from sglang_ssd.hooks import all_hooks

logger = logging.getLogger(__name__)

SUPPORTED_SGLANG = "0.5.23"

_SYMBOLS = {
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend": "attention on a CPU",
    "sglang.srt.layers.logprob_processor.compute_spec_logprobs": "logprobs of a verify window",
    "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod": "the draft's layers on a CPU",
    "sglang.srt.layers.sampler.apply_custom_logit_processor": "custom logit processors",
    "sglang.srt.managers.overlap_utils.FutureMap": "the overlap loop's relay",
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer": "per-request figures",
    "sglang.srt.managers.utils.GenerationBatchResult": "a forward's result",
    "sglang.srt.mem_cache.memory_pool.KVWriteLoc": "attention on a CPU",
    "sglang.srt.plugins.hook_registry.HookRegistry": "hooks",
    "sglang.srt.runtime_context.get_parallel": "ranks",
    "sglang.srt.runtime_context.get_spec": "K",
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker": "the worker's schema",
    "sglang.srt.speculative.eagle_info.EagleVerifyInput": "the verify window",
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm": "the algorithm's registration",
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo": "the algorithm's class",
    "sglang.srt.speculative.spec_utils.GrammarTree": "structured output inside a window",
    "sglang.srt.speculative.spec_utils.generate_token_bitmask": "structured output inside a window",
    "sglang.srt.utils.async_probe.sanitize_nan_logits": "logits that are not numbers",
}


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
    wanted = {hook.target: hook.reason for hook in all_hooks()} | _SYMBOLS
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
