"""What a host without CUDA needs to run SGLang; a no-op where a GPU works.

Three things are missing there. The ``sgl_kernel`` wheel links against the CUDA driver and cannot be imported, so a
small stand-in of ours goes first on the path, here and in every spawned child. SGLang must be told to run on
the CPU (``SGLANG_USE_CPU_ENGINE``). And its ``torch_native`` attention cannot verify;
:mod:`sglang_ssd.cpu.attention` can.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

STAND_IN = Path(__file__).parent / "stand_in"

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # SGLang compiles its seeded sampler at first use, tens of seconds on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
}


@cache
def has_gpu() -> bool:
    """Whether an accelerator works here. Asks the driver, not torch: importing torch takes seconds."""
    if Path("/dev/kfd").exists():  # ROCm
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def prepare() -> None:
    """Make SGLang importable on a CPU, in this process and in its children. Does nothing where a GPU works."""
    if has_gpu():
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    path = str(STAND_IN)
    if path not in sys.path:
        sys.path.insert(0, path)
    inherited = os.environ.get("PYTHONPATH", "")
    if path not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (path, inherited) if part)


def threads_per_process() -> int:
    """Threads for one model process when the target and the draft share this machine's cores."""
    return max(1, len(os.sched_getaffinity(0)) // 2)
