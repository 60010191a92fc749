"""What the worker keeps of each request: its seed, its tokens as far as they are known, and its session."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_ssd.protocol import Sampling, Tokens, pack_floats, pack_tokens
from sglang_ssd.sampling.seeds import derive_seed
from sglang_ssd.scheduler.figures import RequestFigures

ATTRIBUTE = "_ssd"
"""The attribute of SGLang's ``Req`` that holds its RequestState; it lives and dies with the request."""


@dataclass
class RequestState:
    """One request. ``tokens`` are prompt and output with the pending bonus token, as of the last settled round."""

    req: Any
    seed: int
    num_steps: int
    session: int | None = None
    epoch: int = 0
    retractions: int = -1
    tokens: array[int] = field(default_factory=lambda: array("q"))
    prompt_len: int = 0
    figures: RequestFigures = field(default_factory=RequestFigures)

    @property
    def length(self) -> int:
        """Committed tokens, the pending bonus token included."""
        return len(self.tokens)

    @property
    def output_ids(self) -> list[int]:
        """Tokens emitted so far, the pending bonus token included."""
        return self.tokens[self.prompt_len :].tolist()

    @property
    def remaining(self) -> int:
        """How many more tokens the request may emit."""
        return max(0, int(self.req.sampling_params.max_new_tokens) - (self.length - self.prompt_len))

    @property
    def temperature(self) -> float:
        """0 for greedy, which SGLang writes as temperature 1 with top-k 1."""
        parameters = self.req.sampling_params
        return 0.0 if parameters.top_k == 1 else float(parameters.temperature)

    @property
    def sampling(self) -> Sampling:
        """What the draft server draws with."""
        parameters = self.req.sampling_params
        bias = {int(token): float(value) for token, value in (parameters.logit_bias or {}).items()}
        return Sampling(
            temperature=self.temperature,
            seed=self.seed,
            top_k=parameters.top_k,
            top_p=parameters.top_p,
            min_p=parameters.min_p,
            bias_ids=pack_tokens(list(bias)),
            bias=pack_floats(list(bias.values())),
        )

    @property
    def ended(self) -> bool:
        """Whether the request is finished or has left the batch until it is prefilled again."""
        return bool(self.req.finished() or self.req.is_retracted)

    def restart(self) -> None:
        """Take the tokens from the request, which are authoritative when it is prefilled (again)."""
        self.prompt_len = len(self.req.origin_input_ids)
        self.tokens = array("q", self.req.origin_input_ids)
        self.tokens.extend(array("q", self.req.output_ids))
        self.retractions = self.req.retraction_count
        self.epoch += 1

    def known_tokens(self) -> Tokens:
        """The tokens as an array of their own, int32 [length]."""
        return np.array(self.tokens, dtype=np.int32)


class RequestBook:
    """Every request that the worker has met and that is not yet gone. Arrival order is the same on every rank."""

    def __init__(self, *, server_seed: int, num_steps: int) -> None:
        self._server_seed = server_seed
        self._num_steps = num_steps
        self._arrivals = itertools.count()
        self._sessions = itertools.count(1)
        self._open: dict[int, RequestState] = {}

    def state(self, req: Any) -> RequestState:  # noqa: ANN401 - sglang's Req
        """The state of ``req``, made when it is first seen."""
        state: RequestState | None = getattr(req, ATTRIBUTE, None)
        if state is None:
            state = RequestState(req, seed=self._seed(req), num_steps=self._allowed_steps(req))
            setattr(req, ATTRIBUTE, state)
        return state

    def open_session(self, state: RequestState) -> int:
        """Give ``state`` a session number, never used before."""
        state.session = next(self._sessions)
        self._open[state.session] = state
        return state.session

    def close_ended(self) -> tuple[int, ...]:
        """Forget the sessions whose requests have ended; returns their numbers."""
        ended = tuple(session for session, state in self._open.items() if state.ended)
        for session in ended:
            self._open.pop(session).session = None
        return ended

    def open_states(self) -> Iterator[RequestState]:
        """The requests that have a session."""
        return iter(tuple(self._open.values()))

    def by_session(self, session: int) -> RequestState | None:
        """The request of ``session``, None when it has ended."""
        return self._open.get(session)

    def _seed(self, req: Any) -> int:  # noqa: ANN401 - sglang's Req
        arrival = next(self._arrivals)
        chosen = req.sampling_params.sampling_seed
        return int(chosen) if chosen is not None else derive_seed(self._server_seed, arrival)

    def _allowed_steps(self, req: Any) -> int:  # noqa: ANN401 - sglang's Req
        """Draft tokens per round that this request may get: 0 when speculation is off or cannot serve it."""
        options = request_options(req.sampling_params.custom_params)
        if not options.enabled or req.multimodal_inputs is not None or req.input_embeds is not None:
            return 0
        return self._num_steps if options.num_steps is None else min(self._num_steps, options.num_steps)


@dataclass(frozen=True)
class RequestOptions:
    """``custom_params={"ssd": {...}}`` of one request."""

    enabled: bool = True
    num_steps: int | None = None


def request_options(custom_params: object) -> RequestOptions:
    """The options in a request's ``custom_params``; what is not of the right type counts as not given.

    (:mod:`sglang_ssd.api.options` refuses such a request at the door; here nothing may raise.)
    """
    given = custom_params.get("ssd") if isinstance(custom_params, dict) else None
    if not isinstance(given, dict):
        return RequestOptions()
    enabled, num_steps = given.get("enabled", True), given.get("num_steps")
    is_count = isinstance(num_steps, int) and not isinstance(num_steps, bool) and num_steps >= 0
    return RequestOptions(enabled=enabled is not False, num_steps=num_steps if is_count else None)
