"""Lancet's evaluation on our simulated step, beside the paper's figures. Run with `python -m tests.benchmarks.bench_lancet`."""

import pandas as pd

from engine.reproduce.lancet import against_the_paper, evaluate, settings, weight_gradient_gaps


def main() -> None:
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


if __name__ == "__main__":
    main()
