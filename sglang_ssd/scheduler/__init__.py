"""What runs inside SGLang's scheduler process: the algorithm, one round, and the link to the draft server."""
