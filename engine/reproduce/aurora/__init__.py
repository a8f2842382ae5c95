"""Aurora's evaluation (§8): one model on its GPUs, two on the same, and traffic other than planned for."""

from engine.reproduce.aurora import colocated, exclusive, imprecise

ENTRIES = (*exclusive.ENTRIES, *colocated.ENTRIES, *imprecise.ENTRIES)
