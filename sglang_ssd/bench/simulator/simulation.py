"""One experiment: a profile, a load and a mode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sglang_ssd.bench.simulator.client import Client
from sglang_ssd.bench.simulator.clock import VirtualClock
from sglang_ssd.bench.simulator.draft import VirtualDraft
from sglang_ssd.bench.simulator.engine import Language
from sglang_ssd.bench.simulator.profile import Profile
from sglang_ssd.bench.simulator.target import Crowd, Tally, Target, anywhere, in_turn
from sglang_ssd.bench.simulator.trace import Trace
from sglang_ssd.bench.simulator.weather import Weather
from sglang_ssd.config import SSDConfig
from sglang_ssd.draft_server.engine import EngineLimits
from sglang_ssd.protocol import PROTOCOL_VERSION, Hello, Sampling
from sglang_ssd.scheduler.link import SchedulerOptions

_ROWS_PER_SESSION = 32


@dataclass(frozen=True)
class Load:
    """What is asked: ``batch`` requests at a time of ``new_tokens`` each, at one temperature; ``slow`` times the
    profile's draft.

    Lookahead and fan-out are the profile's unless given; ``options`` are any others of ours, as (name, value).
    ``weather`` seeds a machine whose speed changes. With ``texts``, so many of the trace's are asked for in turn, each
    from its beginning. Every mode makes ``tokens`` for each place in the batch, after ``warm_up`` that do not count, so
    that all of them go through the same texts.
    """

    batch: int = 1
    temperature: float = 0.0
    slow: float = 1.0
    num_steps: int | None = None
    fan_out: int | None = None
    options: tuple[tuple[str, str], ...] = ()
    new_tokens: int = 128
    seed: int = 0
    warm_up: int = 60
    tokens: int = 400
    weather: int | None = None
    texts: int | None = None

    def at(self, batch: int, temperature: float) -> Load:
        """The same with other requests."""
        return replace(self, batch=batch, temperature=temperature)


def simulate(profile: Profile, mode: str, load: Load) -> Tally:
    """Run ``mode`` (``off``, ``sync`` or ``ssd``). Deterministic. Raises ConfigError for options that make no sense."""
    trace = profile.trace(load.temperature)
    if load.texts is None:
        asked = anywhere(trace, load.batch, load.new_tokens, load.seed)
    else:
        trace = trace.first(load.texts)
        asked = in_turn(trace, load.new_tokens)
    language = _language(trace)
    weather = None if load.weather is None else Weather(load.weather)
    times = replace(profile.times, slow=load.slow, weather=weather)
    crowd = Crowd(language, load.batch, asked)
    num_steps = load.num_steps or profile.num_steps
    given: dict[str, Any] = {"fan_out": load.fan_out or profile.fan_out, **dict(load.options)}
    if mode == "sync":
        given.setdefault("wait", "full")  # as in the benchmark: its own deadline would make it off
    config = SSDConfig(mode=mode, **given)
    clock, client = VirtualClock(), None
    if mode != "off":
        limits = EngineLimits(
            slots=load.batch * (load.new_tokens + _ROWS_PER_SESSION * (num_steps + 2)),
            rows=load.batch * (1 + _ROWS_PER_SESSION),
            context_length=load.new_tokens + 2 * num_steps + 2,
            vocab_size=language.vocab_size,
        )
        draft = VirtualDraft(language, times, _hello(config, num_steps, language), limits, load.batch + 1)
        client = Client(draft, clock, num_steps, Sampling(load.temperature, load.seed))
    options = SchedulerOptions(config, None, "simulator")
    target = Target(crowd, times, clock, client, options, num_steps)
    target.run(load.batch * load.warm_up)
    return target.run(load.batch * load.tokens)


def best_sync(profile: Profile, load: Load, longest: int = 8) -> tuple[int, Tally]:
    """``sync`` at its own best lookahead, which is how it has to be compared."""
    runs = {k: simulate(profile, "sync", replace(load, num_steps=k)) for k in range(1, longest + 1)}
    best = max(runs, key=lambda k: runs[k].tokens_per_s)
    return best, runs[best]


def _hello(config: SSDConfig, num_steps: int, language: Language) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        vocab_size=language.vocab_size,
        fingerprint="",
        num_steps=num_steps,
        verify=config.verify,
        mode=config.mode,
        wait=config.wait,
        fan_out=config.fan_out,
        target="simulator",
        planner=config.planner,
    )


@lru_cache(maxsize=8)
def _language(trace: Trace) -> Language:
    return Language.of(trace)
