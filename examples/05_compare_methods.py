"""Compare methods over paired seeds from Python, and see one of them lose.

Run: python examples/05_compare_methods.py
"""

import tempfile
import warnings
from pathlib import Path

import wellcond as wc
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import parse_methods
from wellcond.lab.plan import plan_comparison, write_comparison
from wellcond.lab.pool import run_jobs
from wellcond.lab.records import load_comparisons
from wellcond.lab.report.analysis import analyse

SHORT = [
    "model.arguments={img_size: 8, patch_size: 2, embed_dim: 32, depth: 2, num_heads: 2, mlp_ratio: 2.0}",
    "optimizer.lr=3e-3",
    "training.length={epochs: 7}",
    "evaluation.every={epochs: 7}",
    "checkpoint.every={epochs: 7}",
    "tracking={weights_every: null, jacobian_points: 0}",
]


def main() -> None:
    warnings.simplefilter("ignore", wc.NumericalWarning)  # lam = 10 warns, rightly, that it saturates the softmax
    recipe, base = load_recipe("digits", overrides=SHORT)
    methods, seeds = parse_methods("default,gaussian,conditioned,identity(lam=10)"), (0, 1, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "comparison"
        jobs = plan_comparison(recipe, methods, seeds, folder, base=base, cpu=True)
        write_comparison(folder, recipe, methods, seeds)
        run_jobs(jobs, num_workers=1, observer=lambda job, event: None)
        [comparison] = load_comparisons(folder)
        analysis = analyse(comparison)

    print(f"{'method':18} {'accuracy %':>14} {'minus default [95 % interval], points':>40} {'p (Holm)':>9}")
    for method, summary in analysis.summaries.items():
        line = f"{method:18} {100 * summary.mean:8.1f} ± {100 * summary.std:3.1f}"
        if method in analysis.differences:
            d = analysis.differences[method]
            low, high = (100 * end for end in d.interval)
            line += f" {100 * d.mean:+17.1f} [{low:+6.1f}, {high:+6.1f}] {'':4} {d.p_holm:9.3f}"
        print(line)
    lost = analysis.differences["identity(lam=10)"]
    [control] = [d for d in analysis.required if (d.method, d.baseline) == ("conditioned", "gaussian")]
    print(f"identity(lam=10), the published value, is worse in {sum(v < 0 for v in lost.values.values())} of 3 seeds.")
    print(f"conditioned minus gaussian, its scale control: {100 * control.mean:+.1f} points, p = {control.p:.2f}.")
    print("Three seeds on a toy: read it as an example of the tables, not as evidence.")

    assert lost.count == 3 and all(value < 0 for value in lost.values.values())


if __name__ == "__main__":
    main()
