"""One block of one variant: play the load, and note what client, server, draft server and processor cores say of it."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

import psutil

from sglang_ssd.bench.load import Answer, Ask, play
from sglang_ssd.bench.servers import Server

HEARTBEAT_S = 0.6
"""The draft server's figures reach ``/ssd/status`` twice a second."""
_SAMPLE_EVERY_S = 1.0
_MAY_HAVE_ENDED = 4
"""One request of so many may have ended in a batch that counts as full."""

Record = dict[str, Any]


def measure(server: Server, asks: Sequence[Ask], rate: float | None = None, at_once: int | None = None) -> Record:
    """:func:`play` ``asks`` on an idle server whose caches are emptied first, and return the figures of the block."""
    server.flush()
    time.sleep(HEARTBEAT_S)
    before, cores = server.status(), Cores(server)
    with DraftMemory(server) as memory:
        answers = play(server.url, asks, rate, at_once)
    record = client_figures(answers)
    record["cores"] = cores.used(record["wall_s"])
    time.sleep(HEARTBEAT_S)
    record |= server_figures(before, server.status())
    if memory.peak:
        record["draft_memory"] = {"slots": memory.peak, "sessions": at_once or len(asks)}
    return record


def client_figures(answers: Sequence[Answer]) -> Record:
    """What the client saw. Times in ms unless the name says seconds.

    ``decode`` is :func:`decode_part`, ``full`` :func:`full_part`. ``itl_ms`` are the times between two events of a
    stream; tokens of one round come as one event.
    """
    start, end = min(a.sent for a in answers), max(a.last for a in answers)
    return {
        "wall_s": round(end - start, 4),
        "tokens": sum(answer.tokens for answer in answers),
        "decode": decode_part(answers),
        "full": full_part(answers),
        "requests": [_request_figures(answer) for answer in answers],
        "itl_ms": [round(1e3 * gap, 1) for answer in answers for gap in _gaps(answer)],
    }


def decode_part(answers: Sequence[Answer]) -> Record:
    """The part of a closed block in which nothing is prefilled: its seconds, and the tokens of the rounds in it.

    From the last first token to the last event but one of any stream. SGLang's overlap loop sends what a forward gave
    when the next one has run, and the last two together; so the last event has a round's tokens and no round's time.
    """
    return _part(answers, max(map(_end, answers)))


def full_part(answers: Sequence[Answer]) -> Record:
    """The same, while the batch is full: until more than a quarter of the requests have ended.

    Speculation ends some answers early. What remains then is a smaller batch, not a slower one.
    """
    return _part(answers, sorted(map(_end, answers))[len(answers) // _MAY_HAVE_ENDED])


def _end(answer: Answer) -> float:
    """Of the time that its tokens took: the last event but one."""
    return answer.events[-2][0] if len(answer.events) > 1 else answer.last


def _part(answers: Sequence[Answer], end: float) -> Record:
    gaps = [gap for answer in answers for gap in _gaps(answer)]
    same = 0.1 * median(gaps) if gaps else 0.0  # events of one round come this close together
    start = max(answer.first for answer in answers)
    tokens = 0
    for answer in answers:
        timed = answer.events[:-1] if answer.last >= end - same else answer.events
        counts = [0, *(count for at, count in timed if at <= end + same)]
        before = sum(at <= start + same for at, _ in timed)
        tokens += counts[-1] - counts[before] if before < len(counts) else 0
    return {"s": round(max(0.0, end - start), 4), "tokens": tokens}


def _gaps(answer: Answer) -> list[float]:
    times = [at for at, _ in answer.events]
    return [later - earlier for earlier, later in pairwise(times)]


def _request_figures(answer: Answer) -> Record:
    more = answer.tokens - answer.events[0][1]
    return {
        "data_set": answer.ask.data_set,
        "prompt": len(answer.ask.ids),
        "tokens": answer.tokens,
        "finish": answer.finish,
        "ttft_ms": round(1e3 * (answer.first - answer.sent), 1),
        "tpot_ms": round(1e3 * (answer.last - answer.first) / more, 2) if more else None,
    }


def server_figures(before: Record, after: Record) -> Record:
    """What changed between two readings of ``/ssd/status``; nothing for mode ``off``. Seconds for a round's parts."""
    if "rounds" not in after:
        return {}
    figures: Record = {
        name: after[name] - before[name]
        for name in ("rounds", "hits", "partial", "forwards", "narrow_forwards", "timeouts")
    }
    figures["misses"] = {source: count - before["misses"].get(source, 0) for source, count in after["misses"].items()}
    for name in ("accepted_per_position", "verified_per_position"):
        figures[name] = [late - early for late, early in zip(after[name], before[name], strict=True)]
    figures["parts_s"] = {part: round(_total_s(after, part) - _total_s(before, part), 5) for part in after["round_ms"]}
    first, last = before["draft_figures"], after["draft_figures"]
    names = ("forwards", "rows", "path_rows", "forward_us", "prefill_tokens", "branches_shed")
    return {"server": figures, "draft": {name: last.get(name, 0) - first.get(name, 0) for name in names}}


def _total_s(status: Record, part: str) -> float:
    """``round_ms`` holds means over all forwards since the start."""
    return float(status["round_ms"][part]) * int(status["forwards"]) / 1e3


class Cores:
    """Processor time from now on: by role, and of everything else on the machine."""

    def __init__(self, server: Server) -> None:
        roles = {**server.processes(), "load generator": [psutil.Process(os.getpid())]}
        self._before = [(role, process, _process_s(process)) for role in roles for process in roles[role]]
        self._machine = _machine_s()

    def used(self, seconds: float) -> dict[str, float]:
        """Cores used on average over ``seconds``, by role; ``others`` is what ran beside this benchmark."""
        spent: dict[str, float] = defaultdict(float)
        for role, process, before in self._before:
            with suppress(psutil.NoSuchProcess):  # a draft server that died is started again under another number
                spent[role] += _process_s(process) - before
        spent["others"] = max(0.0, _machine_s() - self._machine - sum(spent.values()))
        return {role: round(value / seconds, 3) for role, value in spent.items()}


def _process_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _machine_s() -> float:
    """Seconds that all cores were busy since the start of the machine."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


class DraftMemory:
    """Looks at the draft server's slots once a second while a block runs; ``peak`` is the most in use."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0

    def __enter__(self) -> DraftMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_EVERY_S):
            figures = self._server.status().get("draft_figures", {})
            self.peak = max(self.peak, figures.get("slots", 0) - figures.get("slots_free", 0))
