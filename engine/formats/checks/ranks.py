"""Which ranks the tokens of a trace come from."""

from collections.abc import Iterator

import numpy as np

from engine.finding import Finding
from engine.workload import RoutingTrace


def check_ranks(trace: RoutingTrace) -> Iterator[Finding]:
    """Ranks without tokens, and how many GPUs the sequences of a recording go round."""
    if trace.source_rank is not None:
        present = np.unique(trace.source_rank)
        ranks = int(present[-1]) + 1
        if gaps := ranks - len(present):
            missing = int((present != np.arange(len(present))).argmax())
            yield Finding(
                severity="warning",
                code="silent-ranks",
                message=(
                    f"{gaps} of {ranks} source ranks have no tokens (first: rank {missing}); add the missing ranks' files, "
                    "or drop source_rank to spread the tokens evenly."
                ),
            )
        else:
            yield Finding(severity="ok", code="silent-ranks", message=f"All {ranks} source ranks have tokens.")
    elif trace.sequence is not None and trace.tokens > 1 and (trace.sequence == trace.sequence[0]).all():
        yield Finding(
            severity="warning",
            code="one-sequence",
            message="All tokens belong to one sequence, so they would all start on one GPU; record several requests.",
        )
    elif trace.sequence is not None:
        yield Finding(
            severity="ok",
            code="sequences",
            message=(
                f"{trace.sources:,} sequences are distributed over the GPUs; on a cluster of more than {trace.sources:,} GPUs "
                "some would start with no tokens."
            ),
        )
