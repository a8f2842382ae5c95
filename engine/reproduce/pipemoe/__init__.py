"""PipeMoE's evaluation (§V): single layers on the lines of its Figure 6, and whole training steps."""

from engine.reproduce.pipemoe import layers, steps

_ORDER = ("Table II", "Table IV", "Table VI", "Table VII", "Figure 3", "Figure 4", "Figure 6")
ENTRIES = tuple(sorted((*layers.ENTRIES, *steps.ENTRIES), key=lambda entry: _ORDER.index(entry.number)))
