"""A planned MoE layer on a rank, with real tensors; `engine.launch` replays recordings on it.

exchange: rows between ranks, as bytes, in the order of a plan and by its ways, with a rank's clock and events
experts: the FFNs of the experts that a rank has
layer_plan: one layer of a plan on a rank
live: exchanges of ranks that each know only their own rows
trip: an exchange as a step of a computation, with gradients
layer: the planned experts of a live layer, one token's trip
gradients: sums of gradients over replicas and ranks
"""
