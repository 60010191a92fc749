"""What a run measures: servers, what is compared on them, and cells of batch size, temperature and data set."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from sglang_ssd.bench.prompts import MIXED
from sglang_ssd.config import PREFIX

OFF, SYNC, SSD, STANDALONE = "off", "sync", "ssd", "standalone"
MAX_TOTAL_TOKENS = 16384
BASE_FLAGS = ("--host", "127.0.0.1", "--max-total-tokens", str(MAX_TOTAL_TOKENS), "--log-level", "warning")


@dataclass(frozen=True)
class Cell:
    """One point: ``batch`` requests at once, or ``batch`` in all at ``rate`` a second (Poisson); up to ``tokens`` each.

    With ``turns`` there are so many times ``batch`` requests of different lengths, and the next begins when one ends.
    ``blocks`` is how often it is measured.
    """

    batch: int
    temperature: float
    tokens: int
    blocks: int
    data_set: str = MIXED
    rate: float | None = None
    turns: int = 1

    @property
    def key(self) -> str:
        """Its name in the results."""
        rate = "" if self.rate is None else f" rate={self.rate:g}"
        turns = "" if self.turns == 1 else f" turns={self.turns}"
        return f"batch={self.batch} T={self.temperature:g} {self.data_set}{rate}{turns}"

    @property
    def requests(self) -> int:
        """Of one block."""
        return self.batch * self.turns

    def tokens_of(self, seed: int) -> int:
        """The most new tokens of the request with this seed. Where requests follow one another it is half as many to
        half as many again: if all were as long, a server without speculation would begin and end them in step.
        """
        if self.turns == 1:
            return self.tokens
        return random.Random(seed).randint(self.tokens // 2, self.tokens + self.tokens // 2)  # noqa: S311 - no secret


@dataclass(frozen=True)
class Sweep:
    """One server after another with another value of ``flag``, and the same ``others``; see :func:`parse_sweep`."""

    flag: str
    values: tuple[str, ...]
    others: tuple[str, ...] = ()

    def variants(self) -> list[tuple[str, tuple[str, ...]]]:
        """(name, flags of the server) for each value."""
        others = "".join(f" {_short(self.others[i])}={self.others[i + 1]}" for i in range(0, len(self.others), 2))
        return [(f"{_short(self.flag)}={value}{others}", (self.flag, value, *self.others)) for value in self.values]


@dataclass(frozen=True)
class Plan:
    """A whole run. ``sync_steps`` are the K that ``sync`` is tried at; its server has the largest.

    ``minutes`` is the time that all cells may take; who has had least of its blocks goes first, so that a run that is
    stopped is balanced. Servers start outside that time.
    """

    name: str
    cells: tuple[Cell, ...]
    minutes: float
    sync_steps: tuple[int, ...] = (1, 2, 3)
    sweeps: tuple[Sweep, ...] = ()
    sweep_cells: tuple[Cell, ...] = ()
    flags: tuple[str, ...] = ()
    """For every server."""
    ssd_flags: tuple[str, ...] = ()
    standalone_flags: tuple[str, ...] = ()
    """SGLang's own flags for a server with its co-located draft (GPUs only); none: it does not take part."""
    bookkeeping: bool = True
    """Whether to measure our own work in a round too (half a minute)."""

    def server_flags(self, mode: str) -> tuple[str, ...]:
        """The command line of the server of ``mode``, behind the launcher's name."""
        if mode == STANDALONE:
            return (*BASE_FLAGS, *self.flags, *self.standalone_flags)
        # Ordinary speculation waits for its drafts, however long they take: no deadline takes its due from it.
        sync = ("--speculative-num-steps", str(max(self.sync_steps)), f"{PREFIX}wait", "full")
        own = {OFF: (), SYNC: sync, SSD: self.ssd_flags}
        return (*BASE_FLAGS, *self.flags, f"{PREFIX}mode", mode, *own[mode])

    @property
    def modes(self) -> tuple[str, ...]:
        """The servers that are compared."""
        return (OFF, SYNC, SSD, STANDALONE) if self.standalone_flags else (OFF, SYNC, SSD)

    def replace(self, **changes: Any) -> Plan:  # noqa: ANN401
        """A copy with ``changes``."""
        return dataclasses.replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """What the results file keeps, and what a resumed run must equal."""
        return dataclasses.asdict(self)


def parse_sweep(text: str) -> Sweep:
    """``fan-out=1,2,4`` or ``fan-out=1,2,4;wait=full``: the first is varied. Raises ValueError.

    A name stands for ``--speculative-ssd-NAME``; ``num-steps`` for SGLang's own; with two dashes it is taken as it is.
    """
    pairs = [part.partition("=") for part in text.split(";")]
    if not all(name and values for name, _, values in pairs):
        raise ValueError(f"a sweep is flag=value,value[;flag=value]; got {text!r}")
    (name, _, values), *others = pairs
    return Sweep(_long(name), tuple(values.split(",")), tuple(p for n, _, v in others for p in (_long(n), v)))


def _long(name: str) -> str:
    if name.startswith("--"):
        return name
    return f"--speculative-{name}" if name == "num-steps" else PREFIX + name


def _short(flag: str) -> str:
    return flag.removeprefix(PREFIX).removeprefix("--speculative-").removeprefix("--")


TOKENS = {1: 48}
_TOKENS = 32
"""New tokens of a request, for two cores: a block then takes 4 to 11 s, most of it with a full batch."""
_FAN_OUTS = Sweep(f"{PREFIX}fan-out", ("1", "3", "9", "27"), (f"{PREFIX}wait", "full"))
_AS_SHIPPED = Sweep(f"{PREFIX}fan-out", ("8",))
_ONE_OUTCOME = Sweep(f"{PREFIX}planner", ("full",))
_NO_FALLBACK = Sweep(f"{PREFIX}fallback", ("none",))


def grid(
    batches: tuple[int, ...], temperatures: tuple[float, ...], blocks: dict[int, int], tokens: int | None = None
) -> tuple[Cell, ...]:
    """A cell for each pair."""
    return tuple(
        Cell(batch, temperature, tokens or TOKENS.get(batch, _TOKENS), blocks.get(batch, 4))
        for temperature in temperatures
        for batch in batches
    )


SMOKE = Plan("smoke", grid((1, 2), (0.0,), {1: 2, 2: 2}, 16), 3.0, (1, 2), bookkeeping=False)
SHORT = Plan("short", grid((1, 4, 16), (0.0, 1.0), {1: 6, 4: 4, 16: 3}), 10.0)
FULL = Plan("full", grid((1, 2, 4, 8, 16, 32), (0.0, 0.7, 1.0), {1: 14, 2: 8, 4: 6, 8: 6, 16: 6, 32: 6}), 36.0)
SWEEPS = Plan(
    "sweeps",
    (),
    0.0,
    sweeps=(_FAN_OUTS, _AS_SHIPPED, _ONE_OUTCOME, _NO_FALLBACK),
    sweep_cells=(Cell(1, 0.0, TOKENS[1], 5),),
    bookkeeping=False,
)
LOAD = Plan("load", tuple(Cell(12, 0.0, 32, 1, rate=rate) for rate in (0.2, 0.5)), 6.0, (1, 2), bookkeeping=False)
STEADY = Plan(
    "steady", tuple(Cell(batch, 0.0, 32, 4, turns=4) for batch in (4, 16, 32)), 17.0, (1, 2), bookkeeping=False
)
PLANS = {plan.name: plan for plan in (SMOKE, SHORT, FULL, SWEEPS, LOAD, STEADY)}
