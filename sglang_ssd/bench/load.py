"""The load: streaming requests to ``/generate``, all at once, some at a time, or at random arrivals, with the
time of every event.

``sglang.benchmark.serving`` reads its options from a module-wide ``args``, spreads the time between two events over
their tokens and has no closed batch of fixed prompts, so the requests here are our own.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


class LoadError(RuntimeError):
    """A request was not answered."""


@dataclass(frozen=True)
class Ask:
    """One request. ``num_steps`` limits K for it; None leaves that to the server."""

    data_set: str
    ids: tuple[int, ...]
    tokens: int
    temperature: float
    seed: int
    num_steps: int | None = None

    def body(self) -> dict[str, Any]:
        """The JSON of ``/generate``. The end of the text is respected."""
        sampling: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": self.tokens,
            "sampling_seed": self.seed,
        }
        if self.num_steps is not None:
            sampling["custom_params"] = {"ssd": {"num_steps": self.num_steps}}
        return {"input_ids": list(self.ids), "sampling_params": sampling, "stream": True}


@dataclass
class Answer:
    """When it was sent, and each event of its stream: (seconds, tokens so far); by one clock for the whole block."""

    ask: Ask
    sent: float
    events: list[tuple[float, int]] = field(default_factory=list)
    finish: str = ""

    @property
    def tokens(self) -> int:
        """New tokens."""
        return self.events[-1][1] if self.events else 0

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.events[0][0]

    @property
    def last(self) -> float:
        """When the last one came."""
        return self.events[-1][0]


def play(url: str, asks: Sequence[Ask], rate: float | None = None, at_once: int | None = None) -> list[Answer]:
    """Send all requests at once, or ``rate`` a second at Poisson arrivals (the same for the same asks); wait for all.
    No more than ``at_once`` are under way: the next one is sent when one ends.

    Raises LoadError.
    """
    return asyncio.run(_play(url, asks, _arrivals(asks, rate), at_once or len(asks)))


def _arrivals(asks: Sequence[Ask], rate: float | None) -> list[float]:
    if rate is None:
        return [0.0] * len(asks)
    chance = random.Random(asks[0].seed)  # noqa: S311 - arrivals, not secrets
    at, arrivals = 0.0, []
    for _ in asks:
        arrivals.append(at)
        at += chance.expovariate(rate)
    return arrivals


async def _play(url: str, asks: Sequence[Ask], arrivals: list[float], at_once: int) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        room = asyncio.Semaphore(at_once)
        work = (_one(session, url, ask, at, room) for ask, at in zip(asks, arrivals, strict=True))
        return list(await asyncio.gather(*work))


async def _one(session: aiohttp.ClientSession, url: str, ask: Ask, at: float, room: asyncio.Semaphore) -> Answer:
    if at:
        await asyncio.sleep(at)
    async with room:
        answer = Answer(ask, time.perf_counter())
        try:
            async with session.post(f"{url}/generate", json=ask.body()) as response:
                if response.status != 200:
                    raise LoadError(f"HTTP {response.status}: {(await response.text())[:300]}")
                async for line in response.content:
                    _note(answer, line)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LoadError(f"no answer: {error!r}") from error
    if not answer.events:
        raise LoadError("an answer without a token")
    return answer


def _note(answer: Answer, line: bytes) -> None:
    """Take one line of the stream in; events that bring no token do not count."""
    if not line.startswith(b"data: {"):
        return
    now = time.perf_counter()
    event = json.loads(line[6:])
    if "error" in event:
        raise LoadError(str(event["error"])[:300])
    meta = event["meta_info"]
    if meta["finish_reason"]:
        answer.finish = meta["finish_reason"]["type"]
    if meta["completion_tokens"] > answer.tokens:
        answer.events.append((now, meta["completion_tokens"]))
