"""The speculative worker: one round, as SGLang's scheduler drives it.

    settle     take in what earlier rounds committed (in the overlap loop they may still be on the device)
    sweep      close the sessions of requests that have ended
    collect    the speculation of every row of this batch, by session and length
    verify     one forward on the target, K+1 wide at most
    commit     hand the outcome to the link, which sends it as soon as it is on the host

The same code serves the sync and the overlap loop. Nothing but `collect` waits for the draft server, and it waits
for a bounded time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_device, get_observability, get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from sglang_ssd.sampling.noise import NoiseTable
from sglang_ssd.sampling.window import Support, Window
from sglang_ssd.scheduler.collector import Collector
from sglang_ssd.scheduler.committed import CommittedRound, CommittedRow
from sglang_ssd.scheduler.decode_log import DecodeLog
from sglang_ssd.scheduler.draft_client import DraftClient
from sglang_ssd.scheduler.draws import draws_one_wide
from sglang_ssd.scheduler.exporter import Exporter
from sglang_ssd.scheduler.figures import Figures
from sglang_ssd.scheduler.grammars import Structured, WindowMask, legal_rows
from sglang_ssd.scheduler.host_copy import HostCopy
from sglang_ssd.scheduler.kv_reserve import is_narrow
from sglang_ssd.scheduler.link import SchedulerOptions, connect
from sglang_ssd.scheduler.requests import RequestBook, RequestState
from sglang_ssd.scheduler.supports import Proposed, window_support
from sglang_ssd.scheduler.verifier import Tell, draw_first, verify

logger = logging.getLogger(__name__)

_LEAST_REMAINING = 3
"""A session is opened when after the first token at least two may follow: with one, no draft can be accepted."""


@dataclass(frozen=True)
class _PendingRow:
    """``verified_len`` is -1 where the forward committed nothing: a prefill chunk that is not the last."""

    state: RequestState
    epoch: int
    verified_len: int
    source: str = ""


@dataclass(frozen=True)
class _PendingRound:
    rows: tuple[_PendingRow, ...]
    copy: HostCopy
    width: int = 0
    verified_from: float | None = None
    """When the verify began; None for a prefill."""


class SSDWorker(BaseSpecWorker):  # type: ignore[misc]
    """SGLang's V2 worker schema (``sglang.srt.speculative.base_spec_worker.BaseSpecWorker``)."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:  # noqa: ANN401, ARG002
        super().__init__()
        self._target_worker = target_worker
        self.device = get_device().device
        self.speculative_num_steps = int(get_spec().speculative_num_steps)
        self.speculative_num_draft_tokens = self.speculative_num_steps + 1
        self._options = SchedulerOptions.of(server_args)
        self._book = RequestBook(server_seed=target_worker.random_seed, num_steps=self.speculative_num_steps)
        self._noise = NoiseTable.of(target_worker.model_config.vocab_size, self.device)
        self._pending: deque[_PendingRound] = deque()
        self._rounds = 0
        self.figures = Figures(
            accepted_per_position=[0] * self.speculative_num_steps,
            verified_per_position=[0] * self.speculative_num_steps,
        )
        self._client = self._connect(server_args)
        policy = self._options.policy(self.speculative_num_steps)
        deadline = self._options.deadline()
        self._collector = Collector(self._client, policy, deadline, self.figures, self.speculative_num_steps)
        self._log = DecodeLog(get_observability().decode_log_interval)
        exports = get_observability().enable_metrics and self._client is not None
        self._exporter = Exporter(server_args.served_model_name) if exports else None

    def _connect(self, server_args: Any) -> DraftClient | None:  # noqa: ANN401
        """Attention-TP rank 0 alone talks to the draft server; the others take its word (`_agreed_on_all_ranks`)."""
        if get_parallel().attn_tp_rank != 0:
            return None
        vocab_size = self._target_worker.model_config.vocab_size
        return connect(self._options, server_args, vocab_size=vocab_size, num_steps=self.speculative_num_steps)

    @property
    def draft_worker(self) -> None:
        """No draft model lives in this process."""
        return

    def status(self) -> dict[str, object]:
        """The scheduler's part of ``/ssd/status``."""
        return {"num_steps": self.speculative_num_steps} | self._totals() | self._collector.describe()

    def _totals(self) -> dict[str, object]:
        """The part that is cheap to tell, for the metrics."""
        link = self._client.describe() if self._client else {"draft_state": "none"}
        return self._options.describe() | self.figures.as_dict() | link

    def forward_batch_generation(
        self,
        batch: Any,  # noqa: ANN401 - sglang's ScheduleBatch
        on_publish: Any = None,  # noqa: ANN401
        grammar_barrier: Any = None,  # noqa: ANN401, ARG002
        pp_proxy_tensors: Any = None,  # noqa: ANN401
    ) -> GenerationBatchResult:
        """One step of the scheduler: a prefill, or one round of decode."""
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish, pp_proxy_tensors)
        return self._round(batch, on_publish)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:  # noqa: ARG002
        """Close the finished request's session now rather than at the next forward."""
        self.sweep()

    def sweep(self) -> None:
        """Close the sessions of requests that have ended, also of those that end without a callback; and see that the
        metrics are up to date.
        """
        ended = self._book.close_ended()
        if ended and self._client is not None:
            self._client.close(ended)
        if self._exporter is not None:
            self._exporter.offer(self._totals)

    def clear_cache_pool(self) -> None:
        """``/flush_cache``: the draft server forgets its prefixes too."""
        if self._client is not None:
            self._client.reset()

    # ---- prefill ----------------------------------------------------------------------------------------------

    def _prefill(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any) -> GenerationBatchResult:  # noqa: ANN401
        self._collector.interrupted()
        self.sweep()
        states = [self._book.state(req) for req in batch.reqs]
        for state in states:
            self._announce(state)
        tell = self._teller(states, [0] * len(states))
        result = draw_first(self.target_worker, batch, states, self._noise, pp_proxy_tensors, tell)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        complete = [int(end) == state.length for end, state in zip(_extend_ends(batch), states, strict=True)]
        ones = torch.ones_like(result.next_token_ids)
        first = [
            _PendingRow(state, state.epoch, 0 if done else -1) for state, done in zip(states, complete, strict=True)
        ]
        self._commit(_PendingRound(tuple(first), HostCopy(result.next_token_ids, ones)))
        return result

    def _announce(self, state: RequestState) -> None:
        """Tell the draft server of a request before the target's own prefill, so that both run at the same time."""
        if state.retractions == state.req.retraction_count:
            return  # a later chunk of the same prefill
        state.restart()
        if state.num_steps == 0 or state.remaining < _LEAST_REMAINING:
            return
        if state.session is None:
            self._book.open_session(state)
            self._collector.joined()
        self._open(state)

    def _open(self, state: RequestState) -> None:
        if self._client is not None and state.session is not None:
            self._client.open(state.session, state.epoch, state.known_tokens(), state.sampling, state.num_steps)

    # ---- one round --------------------------------------------------------------------------------------------

    def _round(self, batch: Any, on_publish: Any) -> GenerationBatchResult:  # noqa: ANN401
        started = time.perf_counter()
        self._settle()
        self.sweep()
        states = [self._book.state(req) for req in batch.reqs]
        limits = [0] * len(states) if is_narrow(batch) else [self._limit(state) for state in states]
        collecting, not_hits = time.perf_counter(), self.figures.requests.not_hits
        answers = self._collector.collect(states, limits)
        self._reopen_lost()
        window, verified = self._window([answer.proposed for answer in answers], limits)
        collected = time.perf_counter()
        result = verify(self.target_worker, batch, window, states, self._noise, self._teller(states, verified))
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        copy = HostCopy(result.next_token_ids.view(len(states), -1), result.accept_lens)
        self._collector.plan_round(len(states))
        rows = [
            _PendingRow(state, state.epoch, count, answer.source)
            for state, count, answer in zip(states, verified, answers, strict=True)
        ]
        self._commit(_PendingRound(tuple(rows), copy, window.width, collected))
        self.figures.forwards += 1
        self.figures.narrow_forwards += window.width == 1
        self.figures.wait_s += collected - collecting
        if self.figures.requests.not_hits == not_hits:
            self.figures.hit_wait_s += collected - collecting
        self.figures.other_s += collecting - started
        if self._client is not None:
            self._log.note(self.figures, self._client.state)
        return result

    def _limit(self, state: RequestState) -> int:
        """How many drafts of this request may be verified in this round; the bonus takes one of what remains."""
        if state.session is None or draws_one_wide(state):
            return 0
        return max(0, min(state.num_steps, state.remaining - 1))

    def _reopen_lost(self) -> None:
        """Sessions that the draft server has lost start again with a new epoch and all their tokens."""
        if self._client is None:
            return
        for session in self._client.take_lost():
            state = self._book.by_session(session)
            if state is not None:
                state.epoch += 1
                self._open(state)

    def _window(self, proposed: list[Proposed], limits: list[int]) -> tuple[Window, list[int]]:
        """The drafts as one padded tensor, as wide as the longest row (K+1 where CUDA graphs replay that width)."""
        proposed = _agreed_on_all_ranks(proposed)
        drafts = [row.tokens for row in proposed]
        verified = [min(len(row), limit) for row, limit in zip(drafts, limits, strict=True)]
        graphs = bool(self.target_worker.get_decode_cuda_graph_bs())
        columns = self.speculative_num_steps if graphs and any(limits) else max(verified)
        padded = [row[:count] + [0] * (columns - count) for row, count in zip(drafts, verified, strict=True)]
        host = torch.tensor([[*row, count] for row, count in zip(padded, verified, strict=True)], dtype=torch.int64)
        both = host.view(len(drafts), columns + 1).to(self.device, non_blocking=True)
        return Window(both[:, :columns], both[:, columns], self._support(proposed, columns)), verified

    def _teller(self, states: list[RequestState], verified: list[int]) -> Tell:
        """Passes what grammars allow on to the draft server; the link's thread reads the bits."""
        structured = [
            Structured(index, state.session, state.epoch, state.length, count)
            for index, (state, count) in enumerate(zip(states, verified, strict=True))
            if state.session is not None and state.req.grammar is not None
        ]

        def tell(mask: WindowMask) -> None:
            if self._client is not None and structured:
                self._client.restrict(lambda: legal_rows(mask, structured))

        return tell

    def _support(self, proposed: list[Proposed], columns: int) -> Support | None:
        """The q of every draft, in rejection mode."""
        if self._options.config.verify != "rejection":
            return None
        support = window_support(proposed, columns)
        return Support(*(part.to(self.device, non_blocking=True) for part in (support.ids, support.q)))

    # ---- outcomes ---------------------------------------------------------------------------------------------

    def _commit(self, round_: _PendingRound) -> None:
        """Note a forward's outcome, to be settled here and sent by the link once it is on the host."""
        self._rounds += 1
        self._pending.append(round_)
        if self._client is None:
            return
        told = [i for i, row in enumerate(round_.rows) if row.verified_len >= 0 and row.state.session is not None]
        if told:
            self._client.commit(self._committed_round(round_, told))

    def _committed_round(self, round_: _PendingRound, told: list[int]) -> CommittedRound:
        rows, copy = round_.rows, round_.copy
        committed = tuple(
            CommittedRow(
                session=rows[i].state.session or 0,
                epoch=rows[i].epoch,
                length_before=rows[i].state.length,
                verified_len=rows[i].verified_len,
                remaining_before=rows[i].state.remaining,
            )
            for i in told
        )

        def tokens() -> list[list[int]]:
            everything = copy.committed()
            return [everything[i] for i in told]

        return CommittedRound(
            self._rounds, committed, tokens, self._collector.expected_us(len(rows)), self._collector.plan
        )

    def _settle(self) -> None:
        """Take in every earlier outcome, waiting for the device where the overlap loop runs ahead of it."""
        while self._pending:
            pending = self._pending.popleft()
            for row, tokens in zip(pending.rows, pending.copy.committed(), strict=True):
                if row.verified_len < 0 or row.epoch != row.state.epoch:
                    continue  # a middle chunk, or the request has been prefilled again since
                row.state.tokens.extend(tokens)
                self._collector.settled(row.source, len(tokens) - 1, row.verified_len)
            if pending.verified_from is not None:
                seconds = pending.copy.arrived_at - pending.verified_from
                self._collector.forwarded(len(pending.rows), pending.width, seconds)


def _extend_ends(batch: Any) -> list[int]:  # noqa: ANN401
    lengths: Tensor = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.seq_lens.cpu()
    ends: list[int] = lengths.tolist()
    return ends


def _agreed_on_all_ranks(proposed: list[Proposed]) -> list[Proposed]:
    """What was proposed to attention-TP rank 0, which alone talks to the draft server."""
    group = get_parallel().attn_tp_group
    if group.world_size == 1:
        return proposed
    agreed: list[Proposed] = group.broadcast_object(proposed, src=0)
    return agreed
