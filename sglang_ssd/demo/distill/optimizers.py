"""The optimiser of a run: Muon for the matrices of the layers, AdamW for the rest of them, stepped as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Optimizers:
    """``trained`` float32 tensors. ``decay`` is the weight decay of matrices; vectors (norms) have none.

    Muon's steps are scaled to the size of AdamW's (``match_rms_adamw``), so that one learning rate serves both.
    """

    def __init__(self, trained: Iterable[Tensor], decay: float) -> None:
        tensors = list(trained)
        matrices = [each for each in tensors if each.ndim == 2]
        vectors = [each for each in tensors if each.ndim != 2]
        self._both: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )

    def step(self, rate: float) -> None:
        """One step down the gradients at the learning rate ``rate``, which are gone then."""
        for optimizer in self._both:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """What :meth:`load` takes."""
        return [optimizer.state_dict() for optimizer in self._both]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Go on as the run that ``state`` was taken of."""
        for optimizer, each in zip(self._both, state, strict=True):
            optimizer.load_state_dict(each)
