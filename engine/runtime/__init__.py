"""Planned MoE layers on a rank, with real tensors: those of a person's own model, and those that `engine.launch` replays
recordings on.

exchange: rows between ranks, as bytes, in the order of a plan and by its ways, with a rank's clock and events
experts: the FFNs of the experts that a rank has
layer_plan: one layer of a plan on a rank: experts held, copies that serve, order, travel
live: exchanges of ranks that each know only their own rows: sizes first, then rows
trip: an exchange as a step of a computation, which gradients go backwards
layer: the planned experts of a live model's layer, one token's trip
ranks: the group of a plan's ranks, and the end of one of them
gradients: sums of gradients, over replicas and over all ranks
adapters: the MoE blocks of a family of models
apply: a plan applied to a model
moving: a plan exchanged for another one while the model runs
fit: a plan and a model by its sizes alone
describe: a model in a folder before anything is loaded, for those without PyTorch
checkpoint, weights, memory: a model out of a folder, with the experts of this rank alone
"""
