"""A planned training step as a real one: operators with their gradients, collectives beside them, and a reference.

What runs it is `run.StepExecutor`; how large it is, and how to make it small enough, is in `sizes`.
"""
