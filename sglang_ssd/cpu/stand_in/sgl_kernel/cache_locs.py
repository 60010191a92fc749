"""Slot bookkeeping on tensors that live on the CPU. Index arguments are 1-D integer tensors, an entry a request."""

import ctypes

from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write consecutive runs of ``out_cache_loc`` into ``req_to_token[row, start:end]``."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        if end > req_to_token.shape[1]:
            raise IndexError(f"request row {row} would grow to {end} of {req_to_token.shape[1]} entries")
        count = max(0, end - start)
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read ``req_to_token[row, start:end]`` of every request, one after the other, into ``out_cache_loc``."""
    written = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        out_cache_loc[written : written + count] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        written += count


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots after each request's length into ``out_cache_loc``."""
    count = topk * num_steps
    for index, (row, start) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, start : start + count]
        out_cache_loc[index * count : (index + 1) * count] = slots.to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy slots ``src_loc`` to ``tgt_loc`` in every layer's buffer; sources are read before any target is written."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        blocks = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, block in zip(targets, blocks, strict=True):
            ctypes.memmove(base + target * stride, block, stride)
