"""Distil a small draft model from a Llama-family target: its own text, its own distribution, torch and transformers."""
