"""The public SSD engine's own policy as a formula: does our model of times predict what was measured of it?

Its fan-out is the same everywhere, it runs the served chain again each round (the glue forward), it answers when
the whole tree is there, and one miss in a batch drafts the whole batch anew:

    round = service + (1 - p^B) K step(B) + max(verify(B, K+1), glue + K step(B F (K+1)))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_ssd.bench.simulator.profile import Profile, ProfileError, Published, Reference

TOLERANCE = 0.10


@dataclass(frozen=True)
class Check:
    """A published figure and what the formula says, in tokens per second of the whole batch."""

    published: Published
    predicted: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.published.tokens_per_s - 1

    @property
    def holds(self) -> bool:
        """Within the tolerance."""
        return abs(self.error) <= TOLERANCE


def checks(profile: Profile) -> list[Check]:
    """Of every published figure of a profile. Raises ProfileError when it has none."""
    published = reference_of(profile).published
    return [Check(each, reference_speed(profile, each.batch, each.num_steps)) for each in published]


def reference_of(profile: Profile) -> Reference:
    """Raises ProfileError when nothing of the kind was published."""
    if profile.reference is None:
        raise ProfileError(f"{profile.name} has no figures of the reference engine")
    return profile.reference


def reference_speed(profile: Profile, batch: int, num_steps: int) -> float:
    """Tokens per second of the whole batch."""
    reference = reference_of(profile)
    hit, miss = reference.tokens_hit[num_steps], reference.tokens_miss[num_steps]
    tokens = reference.hit_rate * hit + (1 - reference.hit_rate) * miss
    return batch * tokens / reference_round(profile, batch, num_steps)


def reference_round(profile: Profile, batch: int, num_steps: int) -> float:
    """Seconds of a mean round."""
    reference, times = reference_of(profile), profile.times
    some_miss = 1 - reference.hit_rate**batch
    glue = times.step(batch * (num_steps + 1)) if reference.glue_ms is None else reference.glue_ms / 1e3
    tree = glue + num_steps * times.step(batch * reference.fan_out * (num_steps + 1))
    verify = times.verify(batch, num_steps + 1)
    return reference.service_ms / 1e3 + some_miss * num_steps * times.step(batch) + max(verify, tree)


def sync_speed(profile: Profile, batch: int) -> float:
    """Tokens per second of the reference's ordinary speculation: K + 1 forwards of the draft, then the verify."""
    reference, times = reference_of(profile), profile.times
    steps = reference.sync_steps + 1
    return batch * reference.sync_tokens / (times.verify(batch, steps) + steps * times.step(batch))


def validation(profile: Profile) -> Iterator[str]:
    """A Markdown table."""
    yield "| batch | K | published tok/s | model tok/s | error | |"
    yield "|---|---|---|---|---|---|"
    for check in checks(profile):
        published = check.published
        said = "input: its round time is in the profile" if published.used else "prediction"
        verdict = "" if check.holds else ", **misses 10 %**"
        yield (
            f"| {published.batch} | {published.num_steps} | {published.tokens_per_s:g} | {check.predicted:.0f} "
            f"| {check.error:+.1%} | {said}{verdict} |"
        )
    reference = reference_of(profile)
    sync = sync_speed(profile, 1)
    error = sync / reference.sync_published - 1
    yield f"| 1 | {reference.sync_steps}, ordinary | {reference.sync_published:g} | {sync:.0f} | {error:+.1%} | input |"
