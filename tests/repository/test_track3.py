"""results/method/track3.py: an initialisation put into a training script that is not ours."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.num_heads, self.head_dim = dim // 128, 128
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, 128)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, vocab_size, num_layers, model_dim):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, model_dim)
        self.blocks = nn.ModuleList(Attention(model_dim) for _ in range(num_layers))
        self.head = nn.Linear(model_dim, vocab_size)

    def forward(self, inputs, targets):
        x = self.embed(inputs)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


raise SystemExit("the script itself is never run")
for trial in range(1):
    train_steps = 3375

    for name, p in model.named_parameters():
        p.data.zero_() if "bias" in name else p.data.normal_(std=0.02)

    # create the optimizer(s)
    optimizer = torch.optim.AdamW(model.parameters())
"""


def track3(file, *arguments):
    command = [sys.executable, ROOT / "results/method/track3.py", file, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=file.parent)


def test_a_method_is_checked_and_inserted_before_the_optimisers(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    done = track3(file, "--method", "mimetic_vo(beta=0.1)", "--steps", "3250", "--check")
    assert done.returncode == 0, done.stderr
    assert "4 of 19 tensors set" in done.stdout and "all have gradients" in done.stdout
    [made] = tmp_path.glob("train_mimetic*.py")
    text = made.read_text()
    compile(text, made, "exec")
    added = [line for line in text.splitlines() if line not in SCRIPT.splitlines()]
    assert "    train_steps = 3250" in added and "    train_steps = 3375" not in text
    assert any("mimetic_vo(beta=0.1)" in line and "apply_" in line for line in added)
    assert text.index("apply_(") < text.index("# create the optimizer(s)") and file.read_text() == SCRIPT


@pytest.mark.parametrize(
    ("text", "method", "message"),
    [
        ("x = 1\n", "gaussian", "# create the optimizer(s)"),
        (SCRIPT, "gausian", "gaussian"),
        (None, "gaussian", "No such file"),
    ],
)
def test_what_cannot_be_done_is_an_error_and_writes_nothing(tmp_path, text, method, message):
    file = tmp_path / "train.py"
    if text is not None:
        file.write_text(text)
    done = track3(file, "--method", method)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert len(list(tmp_path.iterdir())) == (text is not None)
