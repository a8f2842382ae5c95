"""Launches of a layer, drawn, and the output of one process."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.launch.rank.instructions import RankInstructions, Tokens
from engine.launch.rank.layer import Weights, reference, tokens_in
from engine.model import MoEModel
from engine.plan import Placement
from tests.cases.launch_plans import plan_with

CPU = torch.device("cpu")
SIZES = {"layers": 2, "experts": 5, "experts_per_token": 2, "d_model": 16, "d_ff": 24, "dtype": "fp32"}


def model_of(**sizes) -> MoEModel:
    """A model of `SIZES`, or of other ones."""
    return MoEModel(name="tiny", **SIZES | sizes)


@st.composite
def launches(draw) -> tuple[RankInstructions, Tokens]:
    """A plan of uneven slots and replicas on a few ranks, and tokens with padding; an expert may be chosen twice."""
    ranks, k, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    model = model_of(layers=layers, experts_per_token=k, ffn_matrices=draw(st.sampled_from([2, 3])))
    tokens = draw(st.integers(1, 12))
    chosen = draw(hnp.arrays(np.int16, (tokens, layers, k), elements=st.integers(-1, 4)))
    source = draw(hnp.arrays(np.int32, tokens, elements=st.integers(0, ranks - 1)))
    homes = st.lists(st.sets(st.integers(0, ranks - 1), min_size=1), min_size=5, max_size=5)
    rows = tuple(
        tuple(tuple(e for e in range(5) if rank in homes_of[e]) for rank in range(ranks))
        for homes_of in draw(st.lists(homes, min_size=layers, max_size=layers))
    )
    plan = plan_with(Placement(experts=5, experts_of_gpu=rows, model_layers=tuple(range(layers))))
    return RankInstructions(plans=(plan,), model=model, ranks=ranks, backend="gloo"), Tokens(chosen, source)


def unplanned(instructions: RankInstructions, tokens: Tokens) -> torch.Tensor:
    """The output of one process for all tokens."""
    weights = Weights(instructions.model, instructions.model.layers, instructions.seed, CPU, torch.float32)
    x = tokens_in(len(tokens.experts), instructions.model, instructions.seed, CPU, torch.float32)
    return reference(torch.from_numpy(tokens.experts.astype(np.int64)), instructions.model, weights, x)
