"""The default model pair, made on this machine from a package that carries the weights."""
