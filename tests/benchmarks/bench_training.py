"""Evaluations of Lancet and Lina on the simulated step, with the papers' figures.

`python -m tests.benchmarks.bench_training [lancet | lina …]`: both unless one is named.
"""

import pandas as pd

from engine.reproduce.lancet import against_the_paper, evaluate, settings, weight_gradient_gaps
from engine.reproduce.lina import contention, training
from engine.result import never
from tests.benchmarks.shared import run_parts


def lancet() -> None:
    pd.set_option("display.width", 250, "display.max_columns", 40)
    for dtype in ("fp16", "fp32"):
        print(f"\nThe paper's greedy against the optimum, {dtype}")
        print(weight_gradient_gaps(settings((2, 8), dtype=dtype)).round(6).to_string(index=False))
    for gate, dtype in (("switch", "fp16"), ("switch", "fp32"), ("batch-prioritised", "fp16")):
        rows = pd.DataFrame(evaluate(settings(gates=(gate,), dtype=dtype)))
        print(f"\n{gate} gate, {dtype}, seconds")
        print(rows.round(4).to_string(index=False))
        if gate == "switch":
            print(against_the_paper(rows).set_index("node").T.round(3).to_string())


def lina() -> None:
    pd.set_option("display.width", 200, "display.max_colwidth", 60)
    for make in (training.step_time, training.designs, contention.sweep, training.partition_sizes):
        exhibit = make(never)
        print(f"\n{make.__doc__}")
        print(pd.DataFrame(exhibit.rows).round(4).to_string(index=False))
        print(
            pd.DataFrame([claim.model_dump(include={"quantity", "published", "ours"}) for claim in exhibit.claims]).to_string()
        )


if __name__ == "__main__":
    run_parts({"lancet": lancet, "lina": lina})
