"""Decisions in plain Python: fan-out, waiting, fallback, deadlines. No torch, no SGLang."""
