"""The default model pair, made on this machine from a package that carries the weights."""

from sglang_ssd.demo.pair import DemoPair, demo_pair
from sglang_ssd.demo.source import DemoError

__all__ = ["DemoError", "DemoPair", "demo_pair"]
