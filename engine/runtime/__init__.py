"""Planned MoE layers on a rank, with real tensors: a person's own model under a plan, and replays of `engine.launch`.

    model = apply_plan(model, plan, group)

exchange: rows between ranks, as bytes, in the order of a plan and by its ways, with a rank's clock and events
experts: the FFNs of the experts that a rank has
layer_plan: one layer of a plan on a rank
live: exchanges of ranks that each know only their own rows
trip: an exchange as a step of a computation, with gradients
layer: the planned experts of a live layer, one token's trip
gradients: sums of gradients over replicas and ranks
adapters: the MoE blocks of a family of models
apply: a plan applied to a model
checkpoint, weights, memory: a model out of a folder, with the experts of this rank alone
"""
