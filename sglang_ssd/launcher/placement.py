"""Who runs where: the draft's GPU after the target's, or a core of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ssd.config import ConfigError
from sglang_ssd.processes import split_cores

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SHARED_TARGET_FRACTION = 0.7
_SHARED_DRAFT_TOKENS = 65536


@dataclass(frozen=True)
class Placement:
    """Where target and draft run. Cores are None where processes stay unpinned."""

    draft_device: str
    """What the draft server is told: ``cpu`` or ``cuda`` (it sees one GPU only)."""
    draft_gpu: int | None
    """Index among the GPUs that we see."""
    target_label: str
    draft_label: str
    shared_gpu: bool = False
    target_cores: frozenset[int] | None = None
    draft_cores: frozenset[int] | None = None

    def draft_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """``inherited`` with the draft's own GPU."""
        if self.draft_gpu is None:
            return dict(inherited)
        visible = [name for name in inherited.get(VISIBLE_VARIABLE, "").split(",") if name]
        name = visible[self.draft_gpu] if visible else str(self.draft_gpu)
        return {**inherited, VISIBLE_VARIABLE: name}


def place(server: ServerArgs, draft_device: str | None, gpus: int) -> Placement:
    """The placement on a machine with ``gpus`` visible GPUs. Raises ConfigError.

    Args:
        server: SGLang's record, with its device and parallel sizes.
        draft_device: ``--speculative-ssd-draft-device``.
        gpus: how many GPUs we see; 0 on a CPU host.
    """
    if gpus == 0 or server.device == "cpu":
        return _on_cpu(draft_device)
    used = target_gpus(server)
    label = "GPU " + ", ".join(map(str, used))
    if draft_device == "cpu":
        return Placement("cpu", None, label, "CPU")
    index = _given_gpu(draft_device, gpus)
    index = _next_gpu(used, gpus) if index is None else index
    return Placement("cuda", index, label, f"GPU {index}", shared_gpu=index in used)


def target_gpus(server: ServerArgs) -> list[int]:
    """The GPUs that SGLang will take, in the numbering of the visible ones."""
    count = server.tp_size * server.pp_size * server.dp_size
    return [server.base_gpu_id + i * server.gpu_id_step for i in range(count)]


def make_room(server: ServerArgs, placement: Placement) -> int | None:
    """On a shared GPU leave memory for the draft, unless told otherwise; returns the draft's limit in tokens."""
    if not placement.shared_gpu:
        return None
    server.mem_fraction_static = server.mem_fraction_static or _SHARED_TARGET_FRACTION
    return _SHARED_DRAFT_TOKENS


def _on_cpu(draft_device: str | None) -> Placement:
    if draft_device not in (None, "cpu"):
        raise ConfigError(f"--speculative-ssd-draft-device {draft_device}: there is no such device here; use cpu.")
    target, draft = split_cores(os.sched_getaffinity(0))
    if target == draft:
        return Placement("cpu", None, "CPU", "CPU (the same core)")
    return Placement(
        "cpu", None, _core_label(target), _core_label(draft),
        target_cores=frozenset(target), draft_cores=frozenset(draft),
    )  # fmt: skip


def _core_label(cores: set[int]) -> str:
    return ("CPU core " if len(cores) == 1 else "CPU cores ") + ", ".join(map(str, sorted(cores)))


def _given_gpu(draft_device: str | None, gpus: int) -> int | None:
    if draft_device in (None, "cuda"):
        return None
    kind, _, index = str(draft_device).partition(":")
    if kind != "cuda" or not index.isdecimal() or int(index) >= gpus:
        raise ConfigError(
            f"--speculative-ssd-draft-device {draft_device}: use cpu, cuda, or cuda:0 to cuda:{gpus - 1}."
        )
    return int(index)


def _next_gpu(used: list[int], gpus: int) -> int:
    """The first free GPU after the target's last one, else any free one, else the target's last."""
    last = used[-1]
    candidates = [*range(last + 1, gpus), *range(min(last, gpus))]
    return next((index for index in candidates if index not in used), last)
