"""What a launch should have taken: the simulation of exactly what its ranks ran, with costs measured on their machine."""

import numpy as np

from engine.cluster import Cluster, Gpu, Node
from engine.costs import AlphaBeta, CostProfile, fit_line
from engine.launch.prepare import Launch
from engine.launch.spec import LaunchSpec
from engine.plan import Plan
from engine.problem import Problem
from engine.simulate.inference import simulate
from engine.timeline import Timeline


def fit_profile(measured: dict[str, list], device: str, spec: LaunchSpec, cores: int) -> CostProfile:
    """The α–β profile of this machine, which has `cores` processors, from the sweep at the start of a launch."""
    lines = {name: fit_line(*np.array(points).T) for name, points in measured.items() if points}
    return CostProfile(
        name=f"{spec.ranks} ranks on {device}",
        origin="measured at the start of the launch, all ranks working",
        gemm={device: lines["gemm"]},
        gate={device: lines["gate"]},
        memory={device: lines["memory"]},
        network=lines.get("network"),
        ranks=spec.ranks,
        cores=cores if spec.backend == "gloo" else spec.ranks,
    )


def predict(
    launch: Launch, plan: Plan, profile: CostProfile, bandwidth: np.ndarray | None = None, latency: float = 0.0
) -> Timeline:
    """The simulated timeline of one of a launch's plans.

    bandwidth: float64[rank] bytes/s in each direction, latency: seconds; they count where the profile has no network.
    """
    device = next(iter(profile.gemm))
    rates = np.ones(launch.spec.ranks) if bandwidth is None else bandwidth

    def gpu(rate: float) -> Gpu:
        # Of a GPU only the type, the memory and at most the bandwidths are read: times come from the profile.
        return Gpu(
            type=device,
            memory=2.0**60,
            memory_bandwidth=1,
            flops_fp32=1,
            flops_fp16=1,
            send_bandwidth=rate,
            receive_bandwidth=rate,
        )

    nodes = tuple(Node(name=f"rank {index}", gpus=(gpu(rate),)) for index, rate in enumerate(rates.tolist()))
    here = Cluster(name="this machine", nodes=nodes, latency=latency)
    timeline = simulate(plan, Problem(launch.workloads[0], here, launch.spec.model, AlphaBeta(profile)))
    names = tuple(f"rank {index}" for index in range(launch.spec.ranks))
    return Timeline(timeline.events, names, timeline.source, timeline.cost_source)
