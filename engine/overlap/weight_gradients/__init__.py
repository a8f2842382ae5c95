"""Weight gradients under all-to-alls (Lancet section 4): the paper's greedy, a stronger search, and proofs."""

from engine.overlap.weight_gradients.instance import WeightGradientInstance, overlap
from engine.overlap.weight_gradients.kernel import Algorithm, schedule_weight_gradients
