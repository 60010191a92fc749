"""A model of target and draft server in virtual time. The draft server's and the policy's code in it is the real one.

Nothing here waits or measures: a forward takes what a profile's step-time curve says, and what models would say
comes from a recorded trace. The same seed gives the same figures on any machine.
"""
