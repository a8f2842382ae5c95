"""From what is asked for to what its ranks get, and whether that can run."""

from dataclasses import replace

from engine.goal import Goal
from engine.launch.places.devices import Devices, attached
from engine.launch.places.testbed import emulated
from engine.launch.preparation.inference import prepare_inference
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.place_checks import place_checks
from engine.launch.preparation.prepared import PreparedLaunch
from engine.launch.preparation.training import prepare_training


def prepare(launch: Launch, devices: Devices | None = None) -> PreparedLaunch:
    """Fold the plans onto the ranks, settle what the launch leaves open, and check it where it is to run. Raises InputError
    when it makes no sense; what only forbids it here and now is a check that fails.

    devices: those of this machine (default: looked for, unless the launch goes to a cluster)
    """
    if launch.destination is not None:
        devices, launch = launch.destination.devices, replace(launch, ranks=launch.destination.ranks)
    elif devices is None:
        devices = attached()
    if launch.on == "testbed":
        devices = replace(devices, gpus=(), memory=())  # ranks in namespaces talk over Gloo, from the CPU
    prepared = prepare_training(launch, devices) if launch.goal is Goal.TRAINING else prepare_inference(launch, devices)
    prepared = replace(prepared, destination=launch.destination)
    if launch.on == "testbed":
        ranks = prepared.instructions.ranks
        prepared = prepared.on_testbed(emulated(launch.plans[0], launch.cluster, ranks, launch.scale))
    return replace(prepared, checks=(*prepared.checks, *place_checks(prepared, launch.cluster)))
