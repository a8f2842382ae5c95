"""A whole step of serving: the MoE layers, which are simulated, and the operators beside them, from sources that each have a
name; and what people ask of it: time per token, time to the first token, tokens/s per GPU, memory."""
