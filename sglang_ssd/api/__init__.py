"""The HTTP side: status routes and per-request figures."""
