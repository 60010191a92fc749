"""The scheduler's decisions: how many drafts a batch verifies, and what the draft server does with misses.

Both maximise expected tokens per second from what was measured: the target's forward by batch and width, the draft
server's step by rows (it comes with every answer), how often outcomes hit and how many drafts are accepted. K = 0 is
one of the choices: the batch then decodes, and now and then a few rounds look whether speculation has become worth it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from sglang_ssd.policy.acceptance import Acceptance
from sglang_ssd.policy.clock import StepClock, VerifyClock
from sglang_ssd.policy.fallback import Fallback, Round, best_fallback, rule
from sglang_ssd.policy.running import RunningMean, RunningShare
from sglang_ssd.policy.waits import Waits
from sglang_ssd.policy.worth import expected_tokens

LONGEST_RULE = 32
_KEEP = 1.01
"""What must be gained to leave the present K."""
_LEAST_GAIN = 1.01
"""What speculation must promise over none: chances never fall to 0, so it always promises a little."""
_PLAIN_AT_LEAST_EVERY = 256
"""Rounds; what no speculation would be worth is measured now and then."""
_PLAIN_SAMPLES, _BETWEEN_PLAIN_SAMPLES = 3, 4
"""The first samples come sooner, for one alone may have met a bad moment; and the rounds between these."""
_LOOK_ROWS, _LONGEST_LOOK = 12, 3
"""Answers that one look from K = 0 is after, and its rounds at most."""
_BLIND = 4
"""Rounds before a look: the draft server catches up with the text, which takes it a round or two in a large batch, and
makes a tree. Nobody waits for drafts yet, so more of them cost nothing."""
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 512
_LEAST_MEMORY, _MEMORY_ROUNDS = 64, 32
"""How many rows, and rounds of a large batch, count in what is known of hits and acceptance."""
_FEW, _SHORTEST_PAUSE = 2, 24
"""Other text may be easier to draft: when a request joins a batch of so few, it looks again after so many rounds."""


@dataclass
class _Batch:
    """What is known of batches of one size."""

    num_steps: int
    waits: Waits = field(default_factory=Waits)
    rest_s: RunningMean = field(default_factory=lambda: RunningMean(0.0, gain=1 / 16))
    since_plain: int = 0
    """Rounds since a forward of one token a request."""
    pause: int = _FIRST_PAUSE
    rounds_off: int = 0
    looking: int = 0


class RoundPolicy:
    """One server's decisions. ``kinds`` are the fallbacks that may be chosen. Not ``adaptive``: always the K given,
    and the whole of it on demand where jit is the only kind.
    """

    def __init__(self, num_steps: int, kinds: frozenset[str], *, adaptive: bool) -> None:
        self._most, self._kinds, self._adaptive = num_steps, kinds, adaptive
        self.acceptance = Acceptance()
        self.verify_clock, self.step_clock = VerifyClock(), StepClock()
        self._hit = RunningShare(happened=5.6, tried=8.0)
        self._memory = 1 - 1 / _LEAST_MEMORY
        self._reach = RunningMean(float(num_steps), gain=1 / 32, observed=True)
        self._ngram = RunningMean(1.2, gain=1 / 32, observed=True)
        self._batches: dict[int, _Batch] = {}
        self.blind = adaptive
        """Nothing can be ready for the coming round, so nobody need wait for it."""
        self._news = False

    # ---- what happened ----------------------------------------------------------------------------------------

    def answered(self, source: str, drafts: int, asked: int) -> None:
        """A row's answer: ``drafts`` tokens of the ``asked`` that were of use, from ``source``."""
        if self.blind:
            return  # nothing could be ready
        if source == "none" and "ngram" in self._kinds:
            self._ngram.observe(1.0)  # it found nothing
        ready = source in ("hit", "partial")
        self._hit.observe(ready, self._memory)
        if ready:
            # As many as were asked for: there may be more, but only a longer K would tell.
            self._reach.observe(drafts if drafts < asked else max(self._reach.value, min(asked + 1, self._most)))

    def verified(self, source: str, accepted: int, verified: int) -> None:
        """A row's outcome: ``accepted`` of ``verified`` drafts from ``source``."""
        if source == "ngram":
            self._ngram.observe(1.0 + accepted)
        else:
            self.acceptance.observe(accepted, verified, self._memory)

    def joined(self) -> None:
        """A new request is there."""
        self._news = True

    def forwarded(self, batch: int, width: int, seconds: float) -> None:
        """The target's forward of a decode batch."""
        if width == 1:
            self._of(batch).since_plain = 0
        self.verify_clock.observe(batch, width, seconds)

    def between(self, batch: int, seconds: float) -> None:
        """From one round to the next, neither forward nor wait took so long: scheduling, streaming, other work."""
        self._of(batch).rest_s.observe(seconds)

    def waited(self, batch: int, num_steps: int, seconds: float) -> None:
        """A round with this K, in which nothing had to be drafted, waited so long for its speculations."""
        self._of(batch).waits.observe(num_steps, seconds)

    # ---- decisions --------------------------------------------------------------------------------------------

    def num_steps(self, batch: int) -> int:
        """K of the coming round of a batch of this size. Call once per round."""
        self._memory = 1 - 1 / max(_LEAST_MEMORY, _MEMORY_ROUNDS * batch)
        self._of(batch).waits.begin_round()
        return self._num_steps(batch)

    def _num_steps(self, batch: int) -> int:
        self.blind = False
        if not self._adaptive:
            return self._most
        mine = self._of(batch)
        if mine.num_steps and self._plain_is_due(mine, batch):
            return 0
        if mine.looking:
            mine.looking -= 1
            self.blind = mine.looking > _rounds_of_look(batch)
            return self._settle(mine, batch) if not mine.looking else max(1, self._best(batch, least=1))
        if mine.num_steps == 0:
            mine.rounds_off += 1
            news = self._news and batch <= _FEW
            if mine.rounds_off >= (_SHORTEST_PAUSE if news else mine.pause):
                self._news = False
                mine.rounds_off, mine.looking, self.blind = 0, _BLIND + _rounds_of_look(batch), True
                return max(1, self._best(batch, least=1))
            return 0
        return self._settle(mine, batch)

    def rule(self, batch: int, num_steps: int) -> tuple[Fallback, ...]:
        """The answers for 1, 2, ... missed rows of the coming round."""
        if self.blind:
            return (Fallback("none"),)
        if not self._adaptive and len(self._kinds) == 1:
            return tuple(Fallback(kind, self._most if kind == "jit" else 0) for kind in self._kinds)
        return rule(self._round(batch, num_steps), self._kinds, LONGEST_RULE)

    def fallbacks(self) -> dict[int, str]:
        """What answers as many misses as are to be expected, for every batch size that speculates."""
        return {batch: self._usual(batch, k).kind for batch, k in self.lookaheads().items() if k}

    def switch_point(self) -> int | None:
        """b*: the smallest batch size whose usual misses are not drafted on demand; None when there is none."""
        return next((batch for batch, kind in self.fallbacks().items() if kind != "jit"), None)

    def expectations(self) -> dict[str, object]:
        """What chances and waits are reckoned with: for a row, and by batch size (and K) in milliseconds."""
        return {
            "hit": round(self._hit.value, 3),
            "acceptance": round(self.acceptance.rate, 3),
            "ngram_tokens": round(self._ngram.value, 3),
            "wait_ms": {
                batch: {steps: round(1e3 * seconds, 2) for steps, seconds in known.waits.estimates().items()}
                for batch, known in sorted(self._batches.items())
            },
            "rest_ms": {batch: round(1e3 * known.rest_s.value, 2) for batch, known in sorted(self._batches.items())},
        }

    def lookaheads(self) -> dict[int, int]:
        """The present K of every batch size seen so far."""
        return {batch: known.num_steps for batch, known in sorted(self._batches.items())}

    def _settle(self, mine: _Batch, batch: int) -> int:
        """Choose K; going to 0 again after a look makes the next pause longer."""
        best, before = self._best(batch), mine.num_steps
        if best and self._rate(batch, best) < _LEAST_GAIN * self._rate(batch, 0):
            best = 0
        elif best != before and self._rate(batch, best) < _KEEP * self._rate(batch, before):
            best = before
        if best == 0 and before == 0:
            mine.pause = min(_LONGEST_PAUSE, 2 * mine.pause)
        elif best:
            mine.pause = _FIRST_PAUSE
        mine.num_steps = best
        return best

    def _best(self, batch: int, least: int = 0) -> int:
        return max(range(least, self._most + 1), key=partial(self._rate, batch))

    def _rate(self, batch: int, num_steps: int) -> float:
        """Expected tokens per second of the batch."""
        work = self._work_s(batch, num_steps + 1)
        if work <= 0:
            return float(num_steps)  # nothing is known: speculate
        if num_steps == 0:
            return batch / work
        hit, round_ = self._hit.value, self._round(batch, num_steps)
        answer = self._usual(batch, num_steps)
        per_miss = {"none": 1.0, "ngram": self._ngram.value}.get(
            answer.kind, expected_tokens(self.acceptance.rate, answer.steps)
        )
        tokens = batch * (hit * round_.hit_tokens + (1 - hit) * per_miss)
        drafting = (1 - hit**batch) * answer.steps * self.step_clock.estimate(self._missed(batch)) / 1e6
        return tokens / (work + drafting + self._of(batch).waits.estimate(num_steps))

    def _work_s(self, batch: int, width: int) -> float:
        """A round without waiting; 0.0 before the first forward."""
        verify_s = self.verify_clock.estimate(batch, width)
        return verify_s + self._of(batch).rest_s.value if verify_s > 0 else 0.0

    def _plain_is_due(self, mine: _Batch, batch: int) -> bool:
        """Whether to measure a forward without drafts: the first draft may cost more than each further one, so a line
        through wider forwards does not tell.
        """
        mine.since_plain += 1
        samples = self.verify_clock.samples_near(batch, 1)
        if samples == 0:
            due = self.verify_clock.estimate(batch, 1) > 0  # not before the first forward of all
        else:
            pause = _BETWEEN_PLAIN_SAMPLES if samples < _PLAIN_SAMPLES else _PLAIN_AT_LEAST_EVERY
            due = mine.since_plain > pause
        if due:
            mine.since_plain = 0
        return due

    def _missed(self, batch: int) -> int:
        """Rows that usually miss, when any do."""
        return max(1, round((1 - self._hit.value) * batch))

    def _usual(self, batch: int, num_steps: int) -> Fallback:
        return best_fallback(self._missed(batch), self._round(batch, num_steps), self._kinds)

    def _round(self, batch: int, num_steps: int) -> Round:
        reach = min(float(num_steps), self._reach.value)
        return Round(
            batch=batch,
            limit=num_steps,
            hit_tokens=expected_tokens(self.acceptance.rate, reach),
            hit_width=num_steps + 1,
            jit_acceptance=self.acceptance.rate,
            ngram_tokens=self._ngram.value,
            verify_s=partial(self._work_s, batch),
            step_s=lambda rows: self.step_clock.estimate(rows) / 1e6,
        )

    def _of(self, batch: int) -> _Batch:
        return self._batches.setdefault(batch, _Batch(self._most))


def _rounds_of_look(batch: int) -> int:
    return min(_LONGEST_LOOK, -(-_LOOK_ROWS // batch))
