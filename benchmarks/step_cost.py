"""What a correction adds to a training step of large models, on paper. Run: python benchmarks/step_cost.py.

Rates are those of data sheets: the step at 40 % of the peak of bfloat16, which large runs reach, the products of
corrections at 40 % of float64 (tensor cores) and float32, memory at 80 %. The formulas are counted at sizes that run
here by tests/repository/test_correction_cost.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from correction_cost import correction_cost
from rich.console import Console
from rich.table import Table

COMPUTE, MEMORY = 0.4, 0.8  # of the peak
RATES = {  # bfloat16, float64, float32, bytes per second
    "A100": (312e12, 19.5e12, 19.5e12, 2.0e12),
    "H100": (989e12, 67e12, 67e12, 3.35e12),
}


@dataclass(frozen=True)
class Model:
    """One GPU's part of a training step."""

    name: str
    parameters: float
    layers: int
    heads: int
    """Query, key and value heads of a layer."""
    head_dim: int
    width: int
    tokens: int
    """Of one step on one GPU."""
    split: int = 1
    """Ranks that share the heads of a layer (tensor parallelism)."""
    how: str = "DDP"


MODELS = [
    Model("ViT-B/16, 128 images", 86e6, 12, 36, 64, 768, 128 * 197),
    Model("GPT-2 of 1.7 B, 16k tokens", 1.72e9, 32, 96, 64, 2048, 16384, how="FSDP2"),
    Model("Llama of 70 B, 8k tokens", 70e9, 80, 80, 128, 8192, 8192, how="FSDP2"),
    Model("Llama of 70 B, 64k tokens", 70e9, 80, 80, 128, 8192, 65536, split=8, how="TP 8 over FSDP2"),
]


def main() -> None:
    names = ("model, step of one GPU", "float64, TFLOP", "float32, TFLOP", "weights moved, GB", "kept, GB", "sent")
    table = Table(*names, *(f"{name}: share of a step" for name in RATES))
    for model in MODELS:
        heads = model.layers * model.heads // model.split
        cost = correction_cost(heads, model.head_dim, model.width, itemsize=2)
        shares = []
        for half, double, single, bandwidth in RATES.values():
            step = 6 * model.parameters * model.tokens / model.split / half / COMPUTE
            products = (cost.wide_flops / double + cost.narrow_flops / single) / COMPUTE
            shares.append((products + cost.weight_bytes / bandwidth / MEMORY) / step)
        table.add_row(
            f"{model.name}, {model.how}",
            f"{cost.wide_flops / 1e12:.3f}",
            f"{cost.narrow_flops / 1e12:.3f}",
            f"{cost.weight_bytes / 1e9:.2f}",
            f"{cost.kept_bytes / 1e9:.2f}",
            "nothing",
            *(f"{100 * share:.2f} %" for share in shares),
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
