"""Lina's paper (Li et al., 2023): its worked example, training (§7.2) and inference (§5, §7.3)."""

from engine.reproduce.exhibits import Entry
from engine.reproduce.lina import contention, example, layers, motivation, packing, routing, serving, training, use

ENTRIES = (
    Entry("Table 1", "§2.2", "all-to-alls in training and inference", motivation.table_1, contention.OPENINGS),
    Entry("Figures 2 and 4", "§2.2", "all-to-alls in a layer, and by experts", motivation.shares, contention.OPENINGS),
    Entry("Figure 6", "§2.2", "popular experts of a batch", motivation.popularity, serving.OPENINGS),
    Entry("Table 2", "§5.1", "the most popular experts of every layer", routing.popular_experts, serving.OPENINGS),
    Entry(
        "Figure 7", "§4.1", "a layer's backward pass, three ways to share the network", example.timelines(("7a", "7b", "7c"))
    ),
    Entry("Figure 8", "§4.2", "the same with micro-ops, and pipelined", example.timelines(("8a", "8b")), contention.OPENINGS),
    Entry("Figure 9", "§5.2", "tokens that go on to the same experts", routing.selection_patterns, serving.OPENINGS),
    Entry("Figure 10", "§7.2.1", "speedup of a training step", training.step_time, training.OPENINGS),
    Entry("Figures 11 and 12", "§7.2.1", "an MoE layer, forward and backward", layers.layer_time, training.OPENINGS),
    Entry("Figure 13", "§7.2.1", "all-to-alls of the backward pass", layers.exchange_time, training.OPENINGS),
    Entry("Packing, step by step", "§6.1", "the packing coordinator", packing.coordinator, packing.OPENINGS),
    Entry("Table 3", "§7.2.1", "computing during all-to-alls", use.pipelining_efficiency, training.OPENINGS),
    Entry("Table 4", "§7.2.1", "use of GPUs and of their memory", use.utilisation, (*use.OPENINGS, *training.OPENINGS)),
    Entry("Figure 14", "§7.2.2", "priority, micro-ops and pipelining one after another", training.designs, training.OPENINGS),
    Entry("Figure 14, sweep", "§7.2.2", "its gains, one assumption at a time", contention.sweep, contention.OPENINGS),
    Entry("Figure 15", "§7.2.2", "the step by partition size", training.partition_sizes, training.OPENINGS),
    Entry("Figure 16", "§7.3.1", "median and tail of inference", serving.inference_time, serving.OPENINGS),
    Entry("Figure 17", "§7.3.1", "tail of an MoE layer", serving.layer_time, serving.OPENINGS),
    Entry("Figure 18", "§7.3.1", "tail of all-to-alls, by layer", serving.all_to_all_time, serving.OPENINGS),
    Entry("Figure 19", "§7.3.2", "right estimates, by layer", serving.accuracy, serving.OPENINGS),
    Entry("Table 5", "§7.3.2", "path lengths", serving.path_length, serving.OPENINGS),
    Entry("Table 6", "§7.3.2", "other tasks", serving.tasks, serving.OPENINGS),
)
