"""The training loop: one optimiser step a pack, a cosine over steps or minutes, checkpoints that continue bitwise."""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sglang_ssd.demo.distill.comparison import Comparison
from sglang_ssd.demo.distill.memory import give_back
from sglang_ssd.demo.distill.optimizers import Optimizers
from sglang_ssd.demo.distill.student import layer_tensors
from sglang_ssd.demo.distill.texts import Text

logger = logging.getLogger(__name__)

_REPORT_STEPS, _SAVE_SECONDS = 20, 240


@dataclass
class Progress:
    """Where a run stands: steps done, seconds of work over all its starts."""

    step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """How to train. Either ``steps`` or ``minutes`` end the run, and the learning rate falls along them.

    The rate rises to ``peak`` in the share ``warm_up`` of the run, then falls as a cosine to ``floor`` of it.
    Raises ValueError unless exactly one end is given.
    """

    steps: int | None = None
    minutes: float | None = None
    peak: float = 4e-4
    floor: float = 0.02
    warm_up: float = 0.03
    clip: float = 1.0
    decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("a run ends after steps or after minutes: give one of them")

    def share(self, progress: Progress) -> float:
        """How much of the run is done, 0 to 1."""
        if self.steps is not None:
            return min(1.0, progress.step / self.steps)
        assert self.minutes is not None
        return min(1.0, progress.seconds / (60 * self.minutes))

    def rate(self, share: float) -> float:
        """The learning rate when ``share`` of the run is done."""
        if share < self.warm_up:
            return self.peak * (0.1 + 0.9 * share / self.warm_up)
        fall = (share - self.warm_up) / (1 - self.warm_up)
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * fall)) / 2)


class Trainer:
    """Trains ``comparison.student``. ``checkpoint`` is the file that a run is kept in and continued from.

    Raises ValueError for a checkpoint of another version.
    """

    def __init__(
        self,
        comparison: Comparison,
        recipe: Recipe,
        checkpoint: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comparison, self._recipe, self._checkpoint, self._clock = comparison, recipe, checkpoint, clock
        self._trained = layer_tensors(comparison.student)
        self._optimizers = Optimizers(self._trained.values(), recipe.decay)
        self.progress = Progress()
        if checkpoint.exists():
            self._resume()

    def run(self, packs: Sequence[Sequence[Text]], held_out: Sequence[Text], stop_after: int | None = None) -> None:
        """Train to the end of the recipe, or for ``stop_after`` steps of it, and leave a checkpoint."""
        progress, recipe = self.progress, self._recipe
        begun = saved = self._clock()
        before, last = progress.seconds, math.inf if stop_after is None else progress.step + stop_after
        losses: deque[float] = deque(maxlen=_REPORT_STEPS)
        while (share := recipe.share(progress)) < 1 and progress.step < last:
            losses.append(self._step(pack_of_step(packs, progress.step, recipe.seed), recipe.rate(share)))
            progress.step += 1
            progress.seconds = before + self._clock() - begun
            if progress.step % _REPORT_STEPS == 0:
                self._report(sum(losses) / len(losses), progress.step / len(packs))
                give_back()
            if self._clock() - saved > _SAVE_SECONDS:
                self.save()
                self._report_score(held_out)
                saved = self._clock()
        self.save()
        self._report_score(held_out)

    def save(self) -> None:
        """Weights, optimiser and progress, in one file that is there whole or not at all."""
        state = {
            "student": self._trained,
            "optimizers": self._optimizers.state(),
            "progress": asdict(self.progress),
        }
        unfinished = self._checkpoint.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, self._checkpoint)

    def _step(self, texts: Sequence[Text], rate: float) -> float:
        loss = self._comparison.loss(texts)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._trained.values(), self._recipe.clip)
        self._optimizers.step(rate)
        return float(loss.detach())

    def _report(self, loss: float, epochs: float) -> None:
        progress, share = self.progress, self._recipe.share(self.progress)
        logger.info("Step %d, epoch %.2f, %.1f minutes (%.0f %%): KL %.3f.",
                    progress.step, epochs, progress.seconds / 60, 100 * share, loss)  # fmt: skip

    def _report_score(self, held_out: Sequence[Text]) -> None:
        score = self._comparison.score(held_out)
        logger.info("Step %d, held out: KL %.3f, agreement %.3f.", self.progress.step, score.kl, score.agreement)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, map_location=self._comparison.student.device, weights_only=True)
        if "optimizers" not in state:
            raise ValueError(f"{self._checkpoint} is of another version of this program: begin in another --out.")
        self._comparison.student.load_state_dict(state["student"], strict=False)
        self._optimizers.load(state["optimizers"])
        self.progress = Progress(**state["progress"])
        logger.info("Going on at step %d of %s.", self.progress.step, self._checkpoint)


def pack_of_step(packs: Sequence[Sequence[Text]], step: int, seed: int) -> Sequence[Text]:
    """Every epoch has an order of its own, a function of seed and epoch."""
    epoch, place = divmod(step, len(packs))
    order = random.Random(seed + 7919 * epoch).sample(range(len(packs)), len(packs))  # noqa: S311
    return packs[order[place]]
