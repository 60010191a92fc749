"""A pair of devices and models as numbers: how long forwards take, and what the models say. A JSON file each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np

from sglang_ssd.bench.simulator.synthetic import Synthetic, synthetic_trace
from sglang_ssd.bench.simulator.trace import Trace, shipped_trace
from sglang_ssd.bench.simulator.weather import Weather

PACKAGE = "sglang_ssd.bench.simulator"


class ProfileError(ValueError):
    """The profile cannot be used; the message says why."""


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure that somebody measured: ``tokens_per_s`` of the whole batch. ``used`` says that an input of the profile
    comes from the same run, so that it is no prediction.
    """

    batch: int
    num_steps: int
    tokens_per_s: float
    used: bool = False


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the reference's own policy needs beyond the profile; see ``reference.py``. Times in milliseconds.

    ``tokens_hit`` and ``tokens_miss`` are tokens a round by lookahead; ``glue_ms`` None takes the step-time curve.
    Ordinary speculation makes ``sync_tokens`` a round at ``sync_steps``.
    """

    service_ms: float
    fan_out: int
    hit_rate: float
    tokens_hit: dict[int, float]
    tokens_miss: dict[int, float]
    published: tuple[Published, ...]
    sync_steps: int
    sync_tokens: float
    sync_published: float
    glue_ms: float | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Times in milliseconds.

    ``verify_ms[i][j]`` is a target forward of ``batches[i]`` requests, ``widths[j]`` tokens each; ``step_ms`` are
    (rows, milliseconds) of a draft forward. What lies between is interpolated, what lies beyond goes on straight.
    ``plain_ms[temperature][i]`` is a forward of ``batches[i]`` requests in mode ``off``, where SGLang's own sampler
    draws; without it, one of width 1. ``host_ms`` is the target's work between two forwards; ``draft_host_ms`` is the
    draft server's own work: for a forward, and for each of its rows. ``traces`` names recorded traces of the package;
    without it ``synthetic`` says how to make one. ``source`` says where the numbers come from.
    """

    name: str
    source: str
    batches: tuple[int, ...]
    widths: tuple[int, ...]
    verify_ms: tuple[tuple[float, ...], ...]
    step_ms: tuple[tuple[float, float], ...]
    round_trip_ms: float
    host_ms: float
    draft_host_ms: tuple[float, float]
    num_steps: int
    fan_out: int
    plain_ms: dict[float, tuple[float, ...]] = {}
    traces: str = ""
    synthetic: Synthetic | None = None
    reference: Reference | None = None

    def trace(self, temperature: float) -> Trace:
        """What the models say. Raises ProfileError."""
        if self.synthetic is not None:
            return _synthetic(self.synthetic, temperature)
        try:
            return _shipped(self.traces, temperature)
        except FileNotFoundError as error:
            raise ProfileError(f"{self.name} has no trace at temperature {temperature:g}") from error

    @cached_property
    def times(self) -> Times:
        """The curves, in seconds."""
        verify = np.array(self.verify_ms, dtype=np.float64)
        if verify.shape != (len(self.batches), len(self.widths)):
            raise ProfileError(f"{self.name}: verify_ms is {verify.shape}, not batches by widths")
        if any(len(row) != len(self.batches) for row in self.plain_ms.values()):
            raise ProfileError(f"{self.name}: plain_ms has not one time for each of the batches")
        return Times(self)


@dataclass(frozen=True)
class Times:
    """A profile's curves in seconds, with a draft that is ``slow`` times slower, in any weather."""

    profile: Profile
    slow: float = 1.0
    weather: Weather | None = None

    def verify(self, batch: int, width: int, at: float = 0.0) -> float:
        """A target forward of ``batch`` requests, ``width`` tokens each, that begins ``at`` a time."""
        by_width = [_line(self.profile.widths, row, width) for row in self.profile.verify_ms]
        return self._weather(at) * _line(self.profile.batches, by_width, batch) / 1e3

    def plain(self, batch: int, temperature: float, at: float = 0.0) -> float:
        """A forward of mode ``off`` that begins ``at`` a time."""
        row = self.profile.plain_ms.get(temperature)
        if row is None:
            return self.verify(batch, 1, at)
        return self._weather(at) * _line(self.profile.batches, row, batch) / 1e3

    def step(self, rows: int, at: float = 0.0) -> float:
        """A draft forward that begins ``at`` a time."""
        sizes, times = zip(*self.profile.step_ms, strict=True)
        return self._weather(at) * self.slow * _line(sizes, times, rows) / 1e3

    def _weather(self, at: float) -> float:
        return 1.0 if self.weather is None else self.weather.at(at)

    def draft_host(self, rows: int) -> float:
        """The draft server's own work around a forward."""
        fixed, each = self.profile.draft_host_ms
        return (fixed + each * rows) / 1e3


def load_profile(name: str) -> Profile:
    """A profile of the package by name, or of a file by path. Raises ProfileError."""
    path = Path(name)
    if path.suffix != ".json":
        path = Path(str(files(PACKAGE).joinpath("profiles", f"{name}.json")))
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError as error:
        raise ProfileError(f"there is no profile {name!r}; known are {', '.join(profile_names())}") from error
    except msgspec.DecodeError as error:
        raise ProfileError(f"{path.name}: {error}") from error


def profile_names() -> list[str]:
    """Profiles of the package."""
    folder = Path(str(files(PACKAGE).joinpath("profiles")))
    return sorted(path.stem for path in folder.glob("*.json"))


@lru_cache(maxsize=8)
def _shipped(pair: str, temperature: float) -> Trace:
    return shipped_trace(pair, temperature)


@lru_cache(maxsize=8)
def _synthetic(how: Synthetic, temperature: float) -> Trace:
    return synthetic_trace(how, temperature)


def _line(places: tuple[float, ...], values: tuple[float, ...] | list[float], at: float) -> float:
    """Between two points on their line; beyond the first or last on the line of the nearest two."""
    if len(places) == 1:
        return values[0]
    right = min(max(1, int(np.searchsorted(places, at))), len(places) - 1)
    x0, x1, y0, y1 = places[right - 1], places[right], values[right - 1], values[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
