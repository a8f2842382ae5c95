"""ExFlow's figures and tables: its experiments as problems (`settings`), communication and speed, and studies of affinity."""

from engine.reproduce.exflow.routing import FIGURES, TABLE_III
from engine.reproduce.exflow.speed import FIGURE_6_ENTRY, FIGURE_9_ENTRY, FIGURE_10_ENTRY, TABLE_I

ENTRIES = (TABLE_I, FIGURE_6_ENTRY, *FIGURES[:2], FIGURE_9_ENTRY, FIGURE_10_ENTRY, *FIGURES[2:], TABLE_III)
