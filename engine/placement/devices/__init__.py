"""Experts on devices by their popularity: Lina section 5.2."""

from engine.placement.devices.kernel import DevicesInstance, replicate_devices
from engine.placement.devices.search import Hosting, check_slots, pack_devices

__all__ = ["DevicesInstance", "Hosting", "check_slots", "pack_devices", "replicate_devices"]
