"""Benchmarks. Speed is measured here, never in tests."""
