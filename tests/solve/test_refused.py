"""Malformed input of `solve` is one line that names the part at fault."""

import pytest

from engine.solve import KERNELS, face
from tests.cases import kernels

BY_NODE = kernels.TRAVEL | {"travel": "node"}
PAIRED = kernels.TWO_TIER | {"gpus_per_node": 2}
MALFORMED = {
    "order": [
        ("", ["standard input", "JSON"]),
        ('{"traffic": [[0', ["standard input", "JSON"]),
        ("[" * 100_000, ["standard input"]),
        ("null", ["order"]),
        (kernels.ORDER | {"traffic": []}, ["traffic"]),
        (kernels.ORDER | {"traffic": [[0, 1]]}, ["traffic must be a square matrix, not of shape (1, 2)"]),
        (kernels.ORDER | {"traffic": [[0, 1], [2]]}, ["traffic"]),
        (kernels.ORDER | {"traffic": [[0, -1], [2, 0]]}, ["traffic[0][1] is negative (-1)"]),
        ('{"traffic": [[0, NaN], [2, 0]], "bandwidth": 1}', ["traffic"]),
        ('{"traffic": [[0, 1e999], [2, 0]], "bandwidth": 1}', ["traffic"]),
        ('{"traffic": [[0, 1' + "0" * 400 + '], [2, 0]], "bandwidth": 1}', ["traffic"]),
        (kernels.ORDER | {"bandwidth": 0}, ["order"]),
        (kernels.ORDER | {"bandwidth": [1, 0]}, ["order"]),
        (kernels.ORDER | {"bandwidth": [1, 1, 1]}, ["send must list one bandwidth for each of 2 GPUs, not shape (3,)"]),
        (kernels.ORDER | {"bandwidth": []}, ["order"]),
        ([kernels.ORDER, kernels.ORDER | {"bandwidth": [1]}], ["instance 1"]),
        ([kernels.ORDER, []], ["instance 1"]),
    ],
    "assign": [
        (kernels.ASSIGN | {"tokens": [[1, 2, 3], [1, 2, 3]]}, ["2 GPUs and 3 experts"]),
        (kernels.ASSIGN | {"tokens": [[1, -2], [3, 4]]}, ["negative"]),
        (kernels.ASSIGN | {"bandwidth": [1]}, ["bandwidth", "2", "1"]),
        (kernels.ASSIGN | {"bandwidth": [1, 0]}, ["bandwidth"]),
        (kernels.ASSIGN | {"seconds_per_token": [1, 1, 1]}, ["seconds_per_token", "2", "3"]),
        (kernels.ASSIGN | {"seconds_per_token": [1, -1]}, ["seconds_per_token"]),
    ],
    "colocate": [
        (kernels.PAIRS | {"send_b": [1]}, ["send_b", "2", "1"]),
        ({name: [] for name in kernels.FOUR}, ["send_a"]),
        (kernels.PAIRS | {"recv_a": [1, -1]}, ["recv_a: every value"]),
    ],
    "colocate-heterogeneous": [
        ({"cost": []}, ["cost"]),
        ({"cost": [[]]}, ["cost of GPU 0"]),
        ({"cost": [[1, 2], [3, 4]]}, ["cost"]),
        ({"cost": kernels.TRIPLES["cost"][:1]}, ["cost of GPU 0", "1 GPU"]),
        ({"cost": [[[1, 2], [3]], [[1, 2], [3, 4]]]}, ["cost of GPU 0"]),
        ({"cost": [[[1, 2], [3, 4]], [[1, 2, 3], [4, 5, 6]]]}, ["cost of GPU 1"]),
    ],
    "affinity": [
        (kernels.AFFINITY | {"transitions": []}, ["transitions"]),
        (kernels.AFFINITY | {"transitions": [[]]}, ["transitions"]),
        (kernels.AFFINITY | {"transitions": [[[1, 2], [3]]]}, ["transitions", "layer 0", "2"]),
        (kernels.AFFINITY | {"transitions": [[[1, 2], [3, 4]], [[1]]]}, ["transitions", "layer 1"]),
        (kernels.AFFINITY | {"transitions": [[[1, -2], [3, 4]]]}, ["transitions", "at least 0"]),
        (kernels.AFFINITY | {"gpus": 3}, ["4 experts", "3 GPUs", "1, 2, 4"]),
        (kernels.AFFINITY | {"gpus_per_node": 3}, ["2 GPUs are not whole nodes of 3"]),
        (kernels.AFFINITY | {"cost_gpu": -1}, ["cost_gpu"]),
        (kernels.AFFINITY | {"cost_node": -1}, ["cost_node"]),
        (kernels.AFFINITY | {"staged": "perhaps"}, ["staged"]),
    ],
    "coactivation": [
        (kernels.COACTIVATION | {"experts": []}, ["experts"]),
        (kernels.COACTIVATION | {"experts": [[]]}, ["layer 0", "0 tokens", "5"]),
        (kernels.COACTIVATION | {"experts": [[[0], [1], [2, 3], [1], [0]]]}, ["experts"]),
        (kernels.COACTIVATION | {"experts": [[[0], [1], [2], [1], [-2]]]}, ["experts", "-2"]),
        (kernels.COACTIVATION | {"experts": [[[0], [1], [2], [1], [10**30]]]}, ["experts"]),
        (kernels.COACTIVATION | {"source_gpu": [0, 0, 1, 1, 2]}, ["source_gpu", "0 to 1", "2"]),
        (kernels.COACTIVATION | {"gpus_per_node": 3}, ["gpus_per_node"]),
        (kernels.COACTIVATION | {"cap": 0.5}, ["cap", "at least 1"]),
        (kernels.COACTIVATION | {"expert_count": 5}, ["5 experts"]),
    ],
    "popularity": [
        (kernels.POPULARITY | {"train": [[0, 1, 2], [0, 1]]}, ["train", "equal length"]),
        (kernels.POPULARITY | {"train": [[0, 1, 3]]}, ["train: token 0 names expert 3"]),
        (kernels.POPULARITY | {"train": [[0, 1, -1]]}, ["train: token 0 names expert -1"]),
        (kernels.POPULARITY | {"test_prefix": [[0]]}, ["paths", "2 layers"]),
        (kernels.POPULARITY | {"test_prefix": [[0, 5]]}, ["test_prefix: token 0 names expert 5"]),
        (kernels.POPULARITY | {"path_length": 3}, ["path_length: 3"]),
        (kernels.POPULARITY | {"layer": 2}, ["layer 2"]),
        (kernels.POPULARITY | {"layer": 0}, ["layer 0"]),
        (kernels.POPULARITY | {"top_k": 4}, ["top_k: 4"]),
        (kernels.POPULARITY | {"devices": 0}, ["devices"]),
    ],
    "replicate-devices": [
        (kernels.DEVICES | {"popularity": []}, ["popularity"]),
        (kernels.DEVICES | {"popularity": [1, -1]}, ["popularity", "at least 0"]),
        (kernels.DEVICES | {"popularity": [1e308, 1e308]}, ["popularity", "finite sum"]),
        (kernels.DEVICES | {"devices": 0}, ["devices"]),
        (kernels.DEVICES | {"devices": 1}, ["4 experts do not fit 1 devices", "take 2 devices or allow 4 experts"]),
        (kernels.DEVICES | {"max_experts_per_device": 0}, ["max_experts_per_device"]),
    ],
    "replicate": [
        ({"slots": 16, "gpus": 8}, ["load", "loads"]),
        (kernels.REPLICATE | {"loads": [kernels.LOAD]}, ["either load"]),
        (kernels.REPLICATE | {"load": [[1, 2], [3]]}, ["load", "equal length"]),
        ({"loads": [[[1, 2]], [[1, 2, 3]]], "slots": 4, "gpus": 2}, ["loads", "same layers"]),
        ({"loads": [], "slots": 4, "gpus": 2}, ["loads"]),
        (kernels.REPLICATE | {"load": [[1, -2] * 6]}, ["loads", "at least 0"]),
        (kernels.REPLICATE | {"slots": 8}, ["8 slots for 12 experts", "16"]),
        (kernels.REPLICATE | {"slots": 17}, ["17 slots", "8 GPUs", "16 or 24"]),
        (kernels.REPLICATE | {"gpus": 0}, ["gpus"]),
        (kernels.REPLICATE | {"slots": 10**30}, ["slots"]),
        (kernels.REPLICATE | {"nodes": 3}, ["8 GPUs", "3 nodes", "1, 2, 4 or 8"]),
        (kernels.REPLICATE | {"groups": 5}, ["12 experts", "5 groups", "1, 2, 3, 4, 6 or 12"]),
        (kernels.REPLICATE | {"slots_of_gpu": [2, 2]}, ["slots_of_gpu", "8 GPUs"]),
        (kernels.REPLICATE | {"slots_of_gpu": [10**30] * 8}, ["slots_of_gpu"]),
        (kernels.REPLICATE | {"speed": [1] * 7 + [0]}, ["speed", "positive"]),
    ],
    "pipeline-degree": [
        (kernels.LAYER | {"alpha_comm": -1}, ["alpha_comm"]),
        (kernels.LAYER | {"size_comm": [1, 2]}, ["size_comm"]),
        (kernels.LAYER | {"max_degree": 0}, ["max_degree"]),
        (kernels.LAYER | {"max_degree": 100_001}, ["max_degree"]),
        (kernels.LAYER | {"streams": 3}, ["streams"]),
        (kernels.LAYER | {"streams": 2, "order": "interleaved"}, ["set streams to 1"]),
        (kernels.LAYER | {"beta_comm": 1e300, "size_comm": 1e300}, ["too large"]),
    ],
    "partition": [
        ({"ops": []}, ["ops"]),
        ({"ops": [{"kind": "comp", "times": []}]}, ["times"]),
        ({"ops": [{"kind": "compute", "times": [1]}]}, ["kind"]),
        ({"ops": [{"kind": "comp", "times": [1, 2]}, {"kind": "comm", "times": [1]}]}, ["operator 1 has 1 times"]),
        ({"ops": [{"kind": "comp", "times": [-1]}]}, ["at least 0"]),
        ({"ops": [{"kind": "comp", "times": [None, 1]}]}, ["one part"]),
        ({"ops": [{"kind": "comp", "times": [1e308, 1e308]}]}, ["too large"]),
        (kernels.CHAIN | {"max_range": 0}, ["max_range"]),
    ],
    "partition-axes": [
        ({"domains": {"x": [0.5]}}, ["domains"]),
        ({"domains": {"x": [True]}}, ["domains"]),
        (kernels.AXES | {"constraints": [{"tensors": ["a"], "allowed": []}]}, ["constraint 0", "'a', which has no domain"]),
        ({"domains": {"x": [0]}, "constraints": [{"tensors": [], "allowed": []}]}, ["constraint 0", "no tensor"]),
        ({"domains": {"x": [0]}, "constraints": [{"tensors": ["x"], "allowed": [[0, 1]]}]}, ["2 axes for 1"]),
        (kernels.AXES | {"count": "many"}, ["count"]),
    ],
    "priority": [
        (kernels.PRIORITY | {"alltoall": [[1]]}, ["alltoall → 0"]),
        (kernels.PRIORITY | {"alltoall": [[1, 2, 3]]}, ["alltoall → 0"]),
        (kernels.PRIORITY | {"allreduce": [[0, -1]]}, ["allreduce", "at least 0"]),
        (kernels.PRIORITY | {"micro_op": 0}, ["micro_op"]),
        (kernels.PRIORITY | {"micro_op": 1e-8}, ["micro_op", "pieces"]),
        (kernels.PRIORITY | {"overhead": -1}, ["overhead"]),
    ],
    "weight-gradients": [
        (kernels.GRADIENTS | {"alltoall": [1, -1]}, ["alltoall", "at least 0"]),
        (kernels.GRADIENTS | {"allowed": [[1, 1]]}, ["allowed has 1 rows", "2 dw"]),
        (kernels.GRADIENTS | {"allowed": []}, ["allowed has 0 rows"]),
        (kernels.GRADIENTS | {"allowed": [[1, 1], [1]]}, ["allowed → 1 has 1 values", "2 alltoall"]),
        (kernels.GRADIENTS | {"allowed": [[1, 1], [1, 2]]}, ["allowed → 1 → 1"]),
        (kernels.GRADIENTS | {"allowed": [[1, 1], [1, 0.5]]}, ["allowed → 1 → 1"]),
    ],
    "travel": [
        (BY_NODE | {"experts": [[0, 1], [2]]}, ["same number of choices"]),
        (BY_NODE | {"experts": [[0, 1, 4], [1, 2, 3]]}, ["experts must lie in -1 … 3"]),
        (BY_NODE | {"source_gpu": [0]}, ["1 entries for 2 tokens"]),
        (BY_NODE | {"source_gpu": [0, 4]}, ["source_gpu must lie in 0 … 3"]),
        (BY_NODE | {"gpu_of_expert": [0, 1, 2, 4]}, ["gpu_of_expert must lie in 0 … 3"]),
        (BY_NODE | {"gpus_per_node": 3}, ["4 GPUs do not divide into nodes of 3"]),
        (kernels.TRAVEL | {"travel": "rail"}, ["travel"]),
    ],
    "two-tier": [
        (
            kernels.TWO_TIER | {"gpus_per_node": 3},
            ["gpus_per_node must divide the 4 GPUs of traffic, or list every node's (3)"],
        ),
        (kernels.TWO_TIER | {"gpus_per_node": [2, 1]}, ["gpus_per_node must list nodes of at least 1 GPU, 4 in all, not 3"]),
        (kernels.TWO_TIER | {"gpus_per_node": [4, 0]}, ["nodes of at least 1 GPU"]),
        (PAIRED | {"link_bandwidth": 0}, ["link_bandwidth must be a positive number, or one for each of 4 GPUs"]),
        (PAIRED | {"bandwidth": [1, 2]}, ["bandwidth must be a positive number, or one for each of 4 GPUs"]),
        (PAIRED | {"traffic": [[0, 1], [1]]}, ["traffic must be a matrix"]),
    ],
}
"""Kernel -> [(instance, parts of the line)]."""


@pytest.mark.parametrize(
    ("kernel", "instance", "parts"),
    [(kernel, instance, parts) for kernel, cases in MALFORMED.items() for instance, parts in cases],
)
def test_a_malformed_instance_is_one_line(solver, kernel, instance, parts):
    solver.refused(kernel, instance, *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ('{"speed": 3}', ["--options", "speed"]),
        ('{"time_limit": 0}', ["--options", "time_limit"]),
        ('{"seed": -1}', ["seed"]),
        (f'{{"seed": {10**30}}}', ["seed: Input should be less than 2147483648"]),
        ("{", ["--options", "JSON"]),
        ("[]", ["--options"]),
        ("[" * 100_000, ["--options", "JSON"]),
    ],
)
def test_malformed_options_are_one_line(solver, options, parts):
    solver.refused("order", kernels.ORDER, *parts, options=options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_wants_its_own_keys_and_no_others(solver, kernel):
    instance = kernels.INSTANCES[kernel]
    solver.refused(kernel, "7", kernel)
    solver.refused(kernel, instance | {"colour": 1}, "colour")
    for name, field in face(kernel)[0].model_fields.items():
        if field.is_required():
            solver.refused(kernel, {key: value for key, value in instance.items() if key != name}, name)
            solver.refused(kernel, instance | {name: "x"}, name)
        elif isinstance(field.default, str):
            solver.refused(kernel, instance | {name: "nowhere"}, name)
        if field.annotation is int:
            for number in (2.5, -1):
                solver.refused(kernel, instance | {name: number}, name)
