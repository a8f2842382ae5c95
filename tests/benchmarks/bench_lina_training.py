"""Lina's scheduler in training, beside the paper's figures: `python -m tests.benchmarks.bench_lina_training`."""

import pandas as pd

from engine.reproduce.lina import PAPER, design_choices, partition_sizes


def main() -> None:
    pd.set_option("display.width", 200)
    print("Speedup of the step over fair sharing without cuts (Figure 14), 16 experts on 16 A100")
    print(design_choices().round(4).to_string(index=False))
    print("the paper's text:", PAPER)
    for model in ("GPT-2", "Transformer-XL"):
        print(f"\nMicro-op size, {model} (Figure 15)")
        print(partition_sizes(model).round(5).to_string(index=False))


if __name__ == "__main__":
    main()
