"""What is taken of a model and its serving step until somebody says more."""

from engine.model import MoEModel
from engine.serving.sizes import TransformerSizes
from engine.serving.step import Phase, ServingStep
from engine.training import TrainingStep

HEAD_SIZE = 128
KV_HEADS = 8


SEQUENCES: dict[Phase, int] = {"decode": 64, "prefill": 4}


def usual_serving(phase: Phase = "decode") -> ServingStep:
    """A step of a chat with 2000 tokens in and 1000 out: one token of 64 sequences per GPU, or the prompts of 4."""
    return ServingStep(phase=phase, sequences=SEQUENCES[phase], context=2000, output=1000)


def usual_sizes(model: MoEModel) -> TransformerSizes:
    """Sizes for a model that tells only its own: heads of 128 that share 8 key-value heads, or as many of them as divide the
    heads, dense FFNs as wide as all experts that a token visits, and the vocabulary of a usual training step."""
    size = min(HEAD_SIZE, model.d_model)
    heads = min(4096, model.d_model // size)
    return TransformerSizes(
        heads=heads,
        kv_heads=next(count for count in range(min(KV_HEADS, heads), 0, -1) if heads % count == 0),
        head_size=size,
        value_size=size,
        dense_d_ff=model.d_ff * (model.experts_per_token + model.shared_experts),
        vocabulary=TrainingStep.model_fields["vocabulary"].default,
    )
