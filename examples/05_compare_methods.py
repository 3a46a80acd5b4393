"""Compare methods over paired seeds, and see one of them lose.

Run: python examples/05_compare_methods.py
"""

from wellcond import lab

if __name__ == "__main__":  # processes that train import this file
    tiny = [
        "model.arguments.depth=2",
        "optimizer.lr=3e-3",
        "training.length={epochs: 7}",
        "tracking={weights_every: null, jacobian_points: 0}",
    ]
    methods = ["default", "gaussian", "conditioned", "identity(lam=10)"]
    result = lab.compare("digits", methods=methods, seeds=3, settings=tiny)
    print(result.table().round(3).to_string(), f"\nThree seeds on a toy. Best here: {result.best()}. {result.folder}")
    assert result.table().loc["identity(lam=10)", "difference"] < 0  # the published value
