"""The draft server: its own process, its own device, and the radix tree that is the speculation cache."""
