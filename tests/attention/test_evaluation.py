"""What ran, in words: the model and its input."""

import torch
from torch import nn

from wellcond.attention.evaluation import describe_input, describe_model

X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_another_input_has_another_digest():
    assert describe_input(X) == describe_input(X.clone()) != describe_input(X + 1)
    assert describe_input({"a": X, "b": (X[0], None)}).startswith(
        "a float32 (3, 3, 16, 16), b float32 (3, 16, 16), sha"
    )
    for odd in (X.bfloat16(), X > 0, X.to(torch.cfloat), X[0, 0, 0, 0], X[:0], X.mT):
        assert ", sha256 " in describe_input(odd)
    assert describe_input(torch.ones(2, device="meta")) == "float32 (2,)"
    assert describe_input(None) == "not given" and describe_input("text") == "str"


def test_wrappers_do_not_hide_a_model():
    plain = nn.Linear(2, 2)
    assert describe_model(torch.compile(plain, backend="eager")) == describe_model(plain) == "Linear, 6 parameters"
