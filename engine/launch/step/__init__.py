"""A planned training step as a real one: operators with their gradients, collectives in parallel, and a reference.

`run.StepExecutor` runs it; `sizes` has its memory and FLOP, and makes it small enough.
"""
