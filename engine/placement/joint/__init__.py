"""Affinity against balance: one placement for both aims, and the front of all."""

from engine.placement.joint.instance import JointFigures, JointInstance, equal_slots
from engine.placement.joint.kernel import place_jointly

__all__ = ["JointFigures", "JointInstance", "equal_slots", "place_jointly"]
