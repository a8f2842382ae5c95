"""A whole step of serving: the simulated MoE layers and the other operators, from sources that each have a name, in the figures
that people use: time per token, time to the first token, tokens/s per GPU, memory."""
