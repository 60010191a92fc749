"""The hash bit for bit against SGLang's own Triton kernel, run by Triton's interpreter in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton has no build for this platform, so SGLang's kernel cannot be run.")

PROGRAM = """
import torch
import sglang_ssd
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
from sglang_ssd.sampling.noise import NoiseTable, as_unsigned

generator = torch.Generator().manual_seed(4)
seeds = torch.randint(-(2**63), 2**63 - 1, (12,), generator=generator)
seeds[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
positions = torch.randint(0, 2**31 - 1, (12,), generator=generator)
positions[:3] = torch.tensor([0, 1, 2**31 - 1])
columns, width = torch.arange(1500), 1500
kernel = torch.empty(12, width, dtype=torch.uint32)
murmur_hash32_kernel[(12, 2)](seeds, positions, columns, kernel, 12, width, BLOCK_SIZE=1024)
ours = as_unsigned(NoiseTable.of(width).bits(seeds, positions, width))
assert kernel.to(torch.int64).unique().numel() > 17_900
assert torch.equal(kernel.to(torch.int64), ours)
"""


def test_bits_are_those_of_sglangs_triton_kernel() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
