"""A whole step of serving: the MoE layers, which are simulated, and the operators beside them, from sources that each have a
name; and what people ask of it: time a token, time to the first token, tokens a second and GPU, memory."""
