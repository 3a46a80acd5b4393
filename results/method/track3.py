"""Write modded-nanogpt's track 3 with an initialisation of wellcond, for a machine with 1, 2, 4 or 8 GPUs.

Track 3 of that repository fixes model (124 M parameters), data and batch, and counts the updates to a validation loss
of 3.28; optimiser and initialisation are free. Nothing of its code is here: this script reads the user's clone, inserts
the lines that initialise the model before the optimisers are made, and writes a new file beside it.

    git clone https://github.com/KellerJordan/modded-nanogpt && cd modded-nanogpt && python data/cached_fineweb10B.py 40
    python track3.py records/track_3_optimization/train_gpt_simple.py --method mimetic_vo --steps 3250 --check
    torchrun --standalone --nproc_per_node=8 records/track_3_optimization/train_gpt_simple_mimetic_vo.py 4

The last number is how many runs; a result counts if (3.28 - mean loss) sqrt(runs) >= 0.004. `--check` builds the file's
model at a tenth of its width on the CPU, initialises it and computes one gradient. It runs the classes of that file.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

import torch
from torch import nn

from wellcond.errors import WellcondError
from wellcond.lab.methods import MethodSettings

MARK = re.compile(r"^([ \t]*)# create the optimizer\(s\)$", re.MULTILINE)
STEPS = re.compile(r"^([ \t]*train_steps = )\d+", re.MULTILINE)
DATA = '"data/fineweb10B/fineweb_train_*.bin"'
LINES = """\
# The initialisation {method} of wellcond; rank 0's weights are broadcast before the first step.
from wellcond.lab.methods import MethodSettings
first_inputs, first_targets = next(distributed_data_generator({data}, batch_size))
MethodSettings.model_validate({method!r}).apply_(
    model, seed=int(torch.randint(2**31, ())), forward=lambda m: m(first_inputs[:4], first_targets[:4])
)
"""


def with_method(source: str, method: MethodSettings, steps: int | None) -> str:
    """The training script with its initialisation; ValueError if it is not the script that this was written for."""
    marks = MARK.findall(source)
    if len(marks) != 1:
        raise ValueError(f"expected one line '# create the optimizer(s)', found {len(marks)}")
    lines = LINES.format(method=method.canonical(), data=DATA).splitlines()
    inserted = "\n".join(f"{marks[0]}{line}" for line in lines)
    source = MARK.sub(lambda mark: f"{inserted}\n\n{mark[0]}", source)
    if steps is None:
        return source
    if len(STEPS.findall(source)) != 1:
        raise ValueError("expected one line 'train_steps = N', found none or several; leave --steps out")
    return STEPS.sub(rf"\g<1>{steps}", source)


def small_model(source: str, file: Path) -> nn.Module:
    """The model of the script at a tenth of its width, from its classes, initialised as the script does."""
    tree = ast.parse(source, str(file))
    classes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]
    names = {node.name for node in classes if isinstance(node, ast.ClassDef)}
    if "GPT" not in names:
        raise ValueError(f"expected a class GPT, found {', '.join(sorted(names)) or 'no class'}")
    space: dict = {"__name__": "track3"}
    exec(compile(ast.Module(classes, []), str(file), "exec"), space)  # the user's own clone, on request
    model = space["GPT"](vocab_size=512, num_layers=2, model_dim=256).float()
    [loop] = [
        node for node in ast.walk(tree) if isinstance(node, ast.For) and "named_parameters" in ast.unparse(node.iter)
    ][:1]
    exec(compile(ast.Module([loop], []), str(file), "exec"), {"model": model})
    return model


def check(source: str, file: Path, method: MethodSettings) -> str:
    """One line on what the method does to the model of the script; raises what goes wrong."""
    torch.manual_seed(0)
    model = small_model(source, file)
    inputs, targets = torch.randint(512, (2, 4, 64)).unbind()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    method.apply_(model, seed=0, forward=lambda m: m(inputs, targets))
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    loss = model(inputs, targets) / targets.numel()
    loss.backward()
    lost = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if lost or not loss.isfinite():
        raise ValueError(f"the loss is {loss:.4g}; without a gradient: {', '.join(lost) or 'none'}")
    return (
        f"{method.label}: {len(changed)} of {len(before)} tensors set, loss {loss:.4f} at the start, all have gradients"
    )


def main() -> None:
    """Read the arguments, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="train_gpt_simple.py of the user's clone")
    parser.add_argument("--method", default="mimetic_vo", help="as in wellcond compare, such as mimetic_vo(beta=0.1)")
    parser.add_argument("--steps", type=int, help="updates; those of the file by default")
    parser.add_argument("--check", action="store_true", help="try it on a small copy of the model, on the CPU")
    options = parser.parse_args()
    try:
        method = MethodSettings.model_validate(options.method)
        source = options.file.read_text("utf-8")
        made = with_method(source, method, options.steps)
        if options.check:
            print(check(source, options.file, method))
    except (OSError, ValueError, SyntaxError, WellcondError) as error:
        sys.exit(f"error: {options.file} with {options.method}: {error}")
    written = options.file.with_name(f"{options.file.stem}_{method.slug.replace('-', '_')}.py")
    written.write_text(made, "utf-8")
    print(f"written: {written}")


if __name__ == "__main__":
    main()
