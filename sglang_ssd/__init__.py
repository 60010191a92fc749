"""Speculative Speculative Decoding (arXiv 2603.03251) as a serving runtime on SGLang.

Importing the package prepares a host without a GPU for SGLang (:mod:`sglang_ssd.cpu`) and does nothing elsewhere.
"""

from sglang_ssd import cpu

__version__ = "0.1.0"

cpu.prepare()
