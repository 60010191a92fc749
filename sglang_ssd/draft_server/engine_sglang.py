"""The draft engine on SGLang's ModelRunner: any model that SGLang loads, CUDA graphs where there are any.

SGLang's schedulers, allocators and prefix cache are not used. Slot ``s`` is entry ``s`` of its KV buffers (page size
1; entry 0 is its padding), row ``r`` is row ``r + 1`` of its ``req_to_token`` table (row 0 is its padding).

Several rows of one decode forward may be tokens of one sequence. That holds wherever a layer writes all
keys and values before it attends and the lengths are per row. Read for it in SGLang 0.5.23: ``forward_decode`` of
torch_native, triton, flashinfer, flashinfer_mla and flashattention (fa3), and the rotary kernel that writes KV itself
(``enable_fused_set_kv_buffer``), which runs before the attention. Ours is ``cpu/draft_attention.py``.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sglang_ssd.draft_server.drawing import draft_draw, joined, to_host
from sglang_ssd.draft_server.edits import Edit, Entries, Forks
from sglang_ssd.draft_server.engine import Candidates, EngineLimits, EngineSettings, Ints, Rows
from sglang_ssd.draft_server.token_map import load_token_map
from sglang_ssd.draft_server.transfer import to_device
from sglang_ssd.sampling.candidates import find_candidates

logger = logging.getLogger(__name__)

T = TypeVar("T")

BLACKWELL_DATACENTER = 10


class UnsupportedModel(ValueError):
    """SGLang loads this model, but its KV cannot be owned slot by slot; the message is one sentence."""


class SGLangEngine:
    """A DraftEngine (see :mod:`sglang_ssd.draft_server.engine`); one per process, for SGLang's context is global."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the model, with SGLang's progress bar. Raises UnsupportedModel, ConfigError, or what SGLang
        raises.
        """
        self._runner = _start_runner(settings)
        _check_pools(self._runner, settings)
        config = self._runner.model_config
        self._device = torch.device(self._runner.device)
        self._table: Tensor = self._runner.req_to_token_pool.req_to_token
        self._edits: list[Edit] = []
        self._token_map = _mapped(settings, config.vocab_size, self._device)
        self._candidates = min(
            settings.candidates, config.vocab_size if self._token_map is None else len(self._token_map)
        )
        self.limits = EngineLimits(
            slots=min(settings.slots, self._runner.max_total_num_tokens),
            rows=settings.rows,
            context_length=config.context_len,
            vocab_size=config.vocab_size,
        )
        if self.limits.slots < settings.slots:
            logger.warning("Memory holds %d of the %d tokens of KV asked for.", self.limits.slots, settings.slots)

    def write(self, rows: Ints, positions: Ints, slots: Ints) -> None:
        """Set ``table[rows[i], positions[i]] = slots[i]`` before the next forward."""
        self._edits.append(Entries.of(rows + 1, positions, slots))

    def fork(self, sources: Ints, lengths: Ints, targets: Ints) -> None:
        """Set ``table[targets[i], :lengths[i]] = table[sources[i], :lengths[i]]`` before the next forward."""
        self._edits.append(Forks.of(sources + 1, lengths, targets + 1))

    @torch.no_grad()
    def decode(self, batch: Rows) -> Candidates:
        """Forward every row's token (its slot is entered in the table first) and return what comes next.

        A batch larger than the table is run in several forwards; order within it is kept.
        """
        starts = range(0, len(batch), self.limits.rows)
        return joined([self._decode_part(batch.part(slice(start, start + self.limits.rows))) for start in starts])

    @torch.no_grad()
    def extend(self, row: int, start: int, tokens: Ints, slots: Ints) -> None:
        """Forward one prefill chunk: ``tokens`` at positions ``start, start+1, ...`` of ``row`` into ``slots``."""
        count = len(tokens)
        entries = Entries.of(np.full(count, row + 1), np.arange(start, start + count), slots)
        entries, ids = self._bring(entries, torch.from_numpy(tokens))
        fields = _extend_fields(start, count, self._device)
        length = torch.tensor([start + count])
        self._forward(_batch(entries.rows[:1], length, ids, entries.slots, entries.positions, **fields))

    def _decode_part(self, batch: Rows) -> Candidates:
        """Candidates of at most as many rows as the table has."""
        entries = Entries.of(batch.rows + 1, batch.positions, batch.slots)
        entries, (ids, draw) = self._bring(entries, (torch.from_numpy(batch.tokens), draft_draw(batch)))
        lengths = torch.from_numpy(batch.positions + 1)
        logits = self._forward(_batch(entries.rows, lengths, ids, entries.slots, entries.positions))
        return to_host(find_candidates(logits, draw, self._candidates, self._token_map))

    def _bring(self, entries: Entries, more: T) -> tuple[Entries, T]:
        """What a forward needs on the device, and the table as it is to be: one copy for all."""
        edits, entries, more = to_device((tuple(self._edits), entries, more), self._device)
        self._edits.clear()
        for edit in (*edits, entries):
            edit.apply(self._table)
        return entries, more

    def _forward(self, batch: Any) -> Tensor:  # noqa: ANN401 - sglang's ForwardBatch
        self._runner.kv_index_translator.bind_own_plan(batch)
        logits: Tensor = self._runner.forward(batch).logits_output.next_token_logits
        return logits


def _mapped(settings: EngineSettings, vocab_size: int, device: torch.device) -> Tensor | None:
    return None if settings.token_map is None else load_token_map(settings.token_map, vocab_size).to(device)


class _OutputRows(torch.nn.Module):
    """What SGLang's LogitsProcessor asks of an output layer without quantisation: its ``weight`` [M, hidden]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


def _keep_mapped_rows(runner: Any, settings: EngineSettings) -> None:  # noqa: ANN401 - sglang's ModelRunner
    """Give the model an output layer of the mapped tokens only, before graphs are captured; a tied embedding stays.

    A graph's logits buffer is as wide as the vocabulary: LogitsProcessor leaves it aside when the widths differ.
    """
    token_map = _mapped(settings, runner.model_config.vocab_size, torch.device(runner.device))
    if token_map is None:
        return
    head = getattr(runner.model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise UnsupportedModel(f"{settings.model_path} has no plain output layer, so it cannot have a token map.")
    runner.model.lm_head = _OutputRows(weight.data[token_map].clone())
    logger.info("The draft proposes %d of its %d tokens.", len(token_map), runner.model_config.vocab_size)


def _pack(model: Any) -> None:  # noqa: ANN401 - one of SGLang's models
    from sglang_ssd.cpu.packed_linear import pack_linear_layers

    logger.info("%d layers lie packed for this CPU.", pack_linear_layers(model))


def graph_batch_sizes(rows: int) -> list[int]:
    """Batch sizes to capture as CUDA graphs: each up to 8, then steps of at most a quarter, up to ``rows`` itself."""
    sizes = [*range(1, 8), *range(8, 32, 4), *range(32, 64, 8), *range(64, 256, 16), *range(256, rows, 32)]
    return [size for size in sizes if size < rows] + [rows]


def _batch(rows: Tensor, lengths: Tensor, tokens: Tensor, slots: Tensor, positions: Tensor, **extend: Any) -> Any:  # noqa: ANN401
    """A ForwardBatch by hand: a decode of one token per row, or with ``extend`` a prefill chunk of one row."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    on_device = positions[-len(rows) :] + 1  # of a chunk, the last token's; saves a copy
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND if extend else ForwardMode.DECODE,
        batch_size=len(rows),
        input_ids=tokens,
        req_pool_indices=rows,
        seq_lens=on_device,
        seq_lens_cpu=lengths,
        orig_seq_lens=on_device.int(),
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=slots,
        positions=positions,
        return_logprob=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        lora_ids=[None] * len(rows),
        rids=[""] * len(rows),
        **extend,
    )


def _extend_fields(start: int, count: int, device: torch.device) -> dict[str, Any]:
    return {
        "extend_num_tokens": count,
        "extend_seq_lens": torch.tensor([count], dtype=torch.int32, device=device),
        "extend_prefix_lens": torch.tensor([start], dtype=torch.int32, device=device),
        "extend_start_loc": torch.zeros(1, dtype=torch.int32, device=device),
        "extend_seq_lens_cpu": [count],
        "extend_prefix_lens_cpu": [start],
        "extend_logprob_start_lens_cpu": [count],
    }


def _start_runner(settings: EngineSettings) -> Any:  # noqa: ANN401 - sglang's ModelRunner
    """A ModelRunner that is ready to forward; the order of its parts is that of sglang.benchmark.one_batch."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish, spawn_world_rank
    from sglang.srt.utils.network import get_free_port_below_ephemeral

    device = torch.device(settings.device)
    arguments = _server_arguments(settings, device)
    arguments.resolve_once()
    gpu = device.index or 0
    ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=gpu)
    publish(arguments, role="scheduler", ranks=ranks)
    _prepare_kernels(device)
    config = ModelConfig.from_server_args(arguments)
    port = get_free_port_below_ephemeral()
    bootstrap.init_parallel_runtime(server_args=arguments, device=device.type, dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    runner = ModelRunner(
        model_config=config,
        mem_fraction_static=get_schedule().mem_fraction_static,
        gpu_id=gpu,
        nccl_port=port,
        server_args=arguments,
    )
    _keep_mapped_rows(runner, settings)
    if device.type == "cpu" and settings.packed:
        _pack(runner.model)
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def _server_arguments(settings: EngineSettings, device: torch.device) -> Any:  # noqa: ANN401 - sglang's ServerArgs
    from sglang.srt.server_args import ServerArgs

    context_length, dtype = _fit(settings, device)
    return ServerArgs(
        model_path=settings.model_path,
        skip_tokenizer_init=True,
        device=device.type,
        base_gpu_id=device.index or 0,
        dtype=dtype,
        context_length=context_length,
        page_size=1,
        # SGLang makes a table of at most half as many rows as the pool has tokens.
        max_total_tokens=max(settings.slots, 2 * settings.rows),
        max_running_requests=settings.rows,
        attention_backend=_attention_backend(device),
        # A pool of its own for sliding-window layers would need SGLang's allocator.
        disable_hybrid_swa_memory=True,
        disable_overlap_schedule=True,
        disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=None if device.type == "cpu" else graph_batch_sizes(settings.rows),
        speculative_algorithm=None,
    )


def _fit(settings: EngineSettings, device: torch.device) -> tuple[int, str]:
    """Context length and dtype for this checkpoint: SGLang refuses a longer context than the checkpoint's, and takes
    ``auto`` of a float32 checkpoint for float16, which its GPU kernels need and a CPU is slow with.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_hf_text_config

    config = get_hf_text_config(get_config(settings.model_path, trust_remote_code=False))
    longest = get_context_length(config)
    keep = settings.dtype == "auto" and device.type == "cpu" and config.dtype in (torch.float32, None)
    return min(settings.context_length or longest, longest), "float32" if keep else settings.dtype


def _attention_backend(device: torch.device) -> str | None:
    """None (SGLang's choice) unless that choice would need pages of more than one token."""
    if device.type == "cpu":
        return "torch_native"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == BLACKWELL_DATACENTER:
        return "flashinfer"
    return None


def _prepare_kernels(device: torch.device) -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config

    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
    initialize_fp4_gemm_config()
    if device.type == "cpu":
        from sglang_ssd.cpu.draft_attention import DraftAttentionBackend

        register_attention_backend("torch_native")(DraftAttentionBackend)


def _check_pools(runner: Any, settings: EngineSettings) -> None:  # noqa: ANN401 - sglang's ModelRunner
    """Raises UnsupportedModel unless a slot holds all that a token leaves behind."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    name = settings.model_path
    if runner.page_size != 1:
        raise UnsupportedModel(f"{name} cannot draft here: its attention backend needs pages of {runner.page_size}.")
    if type(runner.req_to_token_pool) is not ReqToTokenPool:
        raise UnsupportedModel(f"{name} cannot draft: its layers keep a state per sequence, not per token.")
    if runner.is_hybrid_swa or runner.model_config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} cannot draft: its KV does not lie in one pool.")
    if runner.req_to_token_pool.size < settings.rows:
        raise UnsupportedModel(f"{name} gets {runner.req_to_token_pool.size} rows of the {settings.rows} asked for.")
