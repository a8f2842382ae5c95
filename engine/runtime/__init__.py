"""A planned MoE layer on a rank, with real tensors; `engine.launch` replays recordings on it.

exchange: rows between ranks, as bytes, in the order of a plan and by its ways, with a rank's clock and events
experts: the FFNs of the experts that a rank has
"""
