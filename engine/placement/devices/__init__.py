"""Experts on devices by their popularity: Lina section 5.2."""

from engine.placement.devices.kernel import DevicesInstance, replicate_devices
from engine.placement.devices.search import pack_devices
