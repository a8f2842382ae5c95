"""Experts on devices by their popularity: Lina section 5.2."""

from engine.placement.devices.first_fit import Hosting, check_slots, pack_devices
from engine.placement.devices.kernel import replicate_devices

__all__ = ["Hosting", "check_slots", "pack_devices", "replicate_devices"]
