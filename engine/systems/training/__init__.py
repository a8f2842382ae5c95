"""The systems that plan a training step."""

from engine.systems.training import baselines, lancet, lina, pipemoe

SYSTEMS = (*lancet.SYSTEMS, *pipemoe.SYSTEMS, *lina.SYSTEMS, *baselines.SYSTEMS)
