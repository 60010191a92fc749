"""What a result was made on: the kind of machine, versions and devices of each side; never a name or a path."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Cores that this process may use, and the accelerators that torch sees."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cores": len(os.sched_getaffinity(0)), "gpus": gpus, "memory_gib": round(_memory_gib())}


def label(kind: dict[str, Any]) -> str:
    """For a sentence: ``2 cores, CPU``, or the GPUs."""
    gpus = kind["gpus"]
    cores = f"{kind['cores']} cores"
    return f"{cores}, CPU" if not gpus else f"{len(gpus)} x {gpus[0]}, {cores}"


def versions() -> dict[str, str]:
    """Of what decides about speed."""
    names = ("sglang-ssd", "sglang", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def devices(kind: dict[str, Any], info: dict[str, Any]) -> dict[str, int]:
    """How many devices each side computes on, by SGLang's ``/server_info``: GPUs, or cores on a machine without any."""
    if kind["gpus"]:
        target = int(info.get("tp_size", 1))
        return {"target": target, "draft": 1 if len(kind["gpus"]) > target else 0}
    cores = kind["cores"]
    return {"target": max(1, (cores + 1) // 2), "draft": cores // 2}


def command_line(arguments: Sequence[str]) -> str:
    """The command that was given, without the places of this machine."""
    return shlex.join(["python", "-m", "sglang_ssd.bench", *shown(arguments)])


def shown(arguments: Sequence[str]) -> list[str]:
    """Arguments with the last part only of absolute paths."""
    return [Path(part).name if part.startswith("/") else part for part in arguments]


def without_paths(text: str) -> str:
    """Of absolute paths in ``text`` only the last part."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/]+/)+", "", text)


def about(status: dict[str, Any]) -> dict[str, Any]:
    """The settings in ``/ssd/status``; of models only the folder's name."""
    names = ("mode", "verify", "wait", "fallback", "planner", "fan_out", "num_steps")
    known = {name: status[name] for name in names if name in status}
    return known | {name: Path(str(status[name])).name for name in ("target", "draft") if status.get(name)}


def kv_bytes_per_token(model_path: Path) -> int | None:
    """Keys and values of one token in a checkpoint's own dtype; None where its config does not tell."""
    config = json.loads((model_path / "config.json").read_text())
    try:
        heads = config.get("num_key_value_heads", config["num_attention_heads"])
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        layers: int = config["num_hidden_layers"]
    except KeyError:
        return None
    dtype = config.get("torch_dtype") or config.get("dtype")
    return 2 * layers * int(heads) * int(width) * (4 if dtype == "float32" else 2)


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
