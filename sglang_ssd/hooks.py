"""Every change that we make to SGLang, one registered hook each, with its reason.

`HOOKS` is what :mod:`sglang_ssd.plugin` registers and what the compatibility check looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_ssd.api.meta_info import fold_figures
from sglang_ssd.api.options import check_custom_params
from sglang_ssd.api.samples import SampleSeeds
from sglang_ssd.config import SSDConfig

SGLangObject = Any
"""Stands for one of SGLang's own types (Scheduler, ServerArgs, ...), which are not typed for us."""


@dataclass(frozen=True)
class Hook:
    """``kind`` is a name of sglang's ``HookType``; ``target`` the dotted path of what is hooked."""

    target: str
    kind: str
    function: Callable[..., Any]
    reason: str


def all_hooks() -> list[Hook]:
    """The hooks of one process."""
    from sglang_ssd.scheduler.kv_reserve import KVReserve

    reserve = KVReserve()
    return [
        Hook(
            "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
            "AFTER",
            _widen_rows,
            "A request's row must hold the decode reserve beyond the context limit; SGLang's is too short for K >= 7.",
        ),
        Hook(
            "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
            "AROUND",
            reserve.reserve,
            "A step that is prepared one position wide needs less than 2 (K + 1) slots per request.",
        ),
        Hook(
            "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
            "AROUND",
            reserve.check_decode_mem,
            "Before requests are retracted or aborted for want of slots, try the step without drafts.",
        ),
        Hook(
            "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
            "AROUND",
            reserve.prepare_for_decode,
            "Allocate what the check above has found room for.",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.on_idle",
            "BEFORE",
            _sweep_when_idle,
            "A request that ends at prefill has no callback; its session must not outlive it.",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
            "AFTER",
            _streamer_class,
            "Per-request figures leave the scheduler beside the output.",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
            "AFTER",
            _add_internal_state,
            "/server_info and /ssd/status read our figures from the scheduler.",
        ),
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
            "AROUND",
            fold_figures,
            "Per-request figures become integers in meta_info.",
        ),
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
            "AROUND",
            SampleSeeds().send,
            "With a seed and n > 1, SGLang gives every sample the same seed, and so the same text.",
        ),
        Hook(
            "sglang.srt.sampling.sampling_params.SamplingParams.verify",
            "AFTER",
            check_custom_params,
            "A malformed custom_params entry is refused with a sentence, not ignored.",
        ),
        Hook(
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
            "AROUND",
            _graph_spec_info,
            "SGLang describes the captured verify window for its built-in algorithms only.",
        ),
        Hook(
            "sglang.srt.speculative.spec_info.create_dummy_verify_input",
            "AROUND",
            _dummy_verify_input,
            "The same for the warm-up forward before capture.",
        ),
        Hook(
            "sglang.srt.server_args.ServerArgs.add_cli_args",
            "AFTER",
            _add_cli_args,
            "Our options exist in SGLang's own command line too (`sglang serve`).",
        ),
        Hook(
            "sglang.srt.server_args.ServerArgs.from_cli_args",
            "AFTER",
            _from_cli_args,
            "And arrive in the scheduler on a private attribute of the server arguments.",
        ),
    ]


def _is_ssd(algorithm: SGLangObject) -> bool:
    from sglang_ssd.scheduler.algorithm import SSDAlgorithm

    return isinstance(algorithm, SSDAlgorithm)


def _widen_rows(width: int) -> int:
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

    return max(width, int(get_alloc_reserve_per_decode() + get_alloc_page_size() + 3))


def _sweep_when_idle(scheduler: SGLangObject) -> None:
    if _is_ssd(scheduler.spec_algorithm):
        scheduler.draft_worker.sweep()


def _streamer_class(stock: type, scheduler: SGLangObject) -> type:
    if not _is_ssd(scheduler.spec_algorithm):
        return stock
    from sglang_ssd.scheduler.streamer import SSDOutputStreamer

    return SSDOutputStreamer


def _add_internal_state(answer: SGLangObject, scheduler: SGLangObject, _request: SGLangObject) -> SGLangObject:
    if _is_ssd(scheduler.spec_algorithm):
        answer.internal_state["ssd"] = scheduler.draft_worker.status()
    return answer


def _graph_spec_info(stock: Callable[..., Any], runner: SGLangObject, num_tokens: int) -> SGLangObject:
    if not _is_ssd(runner.model_runner.spec_algorithm):
        return stock(runner, num_tokens)
    from sglang_ssd.scheduler.verifier import verify_input

    width = runner.speculative_num_draft_tokens
    return verify_input(width=width, tokens=None, positions=None, custom_mask=runner.buffers.custom_mask)


def _dummy_verify_input(
    stock: Callable[..., Any],
    spec_algorithm: SGLangObject,
    custom_mask: SGLangObject,
    num_tokens_per_req: int,
    is_draft_worker: bool,
) -> SGLangObject:
    if not _is_ssd(spec_algorithm):
        return stock(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
    from sglang_ssd.scheduler.verifier import verify_input

    return verify_input(width=num_tokens_per_req, tokens=None, positions=None, custom_mask=custom_mask)


def _add_cli_args(result: SGLangObject, parser: SGLangObject) -> SGLangObject:
    SSDConfig.add_arguments(parser)
    return result


def _from_cli_args(server_args: SGLangObject, _cls: SGLangObject, arguments: SGLangObject) -> SGLangObject:
    config = SSDConfig.from_arguments(arguments)
    server_args._ssd = {"config": {name: getattr(config, name) for name in config.__dataclass_fields__}}
    return server_args
