"""Experts on devices by their popularity: Lina section 5.2."""

from engine.placement.devices.kernel import replicate_devices
from engine.placement.devices.search import Hosting, check_slots, pack_devices

__all__ = ["Hosting", "check_slots", "pack_devices", "replicate_devices"]
