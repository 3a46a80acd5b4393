"""A checkpoint that every plain model can read, and from which the conditioned one can still resume.

The plain keys hold the effective weights W + C. The raw W, the marker and frozen corrections, which training resumes
from, lie beside them under names that no plain model knows. A conditioned model puts them back when it loads.

| state dict | `blocks.0.qkv.weight` | `wellcond, only to resume training: blocks.0.qkv.weight` |
|---|---|---|
| of a conditioned model | W | absent |
| this one | W + C | W |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.effective import corrections_of, is_conditioned
from wellcond.conditioning.checkpoint import RESUME, marker_of
from wellcond.conditioning.corrections import FrozenCorrection


@torch.no_grad()
def split_state(
    model: nn.Module, state: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The plain state dict with the effective weights, and what it takes to resume from it.

    Args:
        model: a model that is conditioned, as a whole or in parts; of a plain one, the second dict is empty.
        state: its state dict, if it was gathered already.

    Example:
        >>> from wellcond import condition_
        >>> model = condition_(nn.MultiheadAttention(8, 2), "polar")
        >>> plain, resume = split_state(model)
        >>> torch.equal(resume[RESUME + "in_proj_weight"], model.in_proj_weight)
        True
        >>> bool(torch.linalg.cond(plain["in_proj_weight"].reshape(6, 4, 8)).max() <= 2.001)
        True
    """
    plain = dict(model.state_dict() if state is None else state)
    resume: dict[str, Tensor] = {}
    for root_name, root in model.named_modules():
        marker = marker_of(root)
        if marker is None:
            continue
        prefix = f"{root_name}." if root_name else ""
        # Whoever saves may have left out what is no parameter.
        resume[prefix + RESUME + marker] = plain.pop(prefix + marker, root.get_buffer(marker))
        effective: dict[tuple[int, str], Tensor] = {}
        for module_name, module in root.named_modules(remove_duplicate=False):
            path = f"{module_name}." if module_name else ""
            for name, correction in corrections_of(module).items():
                if prefix + path + name not in plain:
                    continue  # a shared weight that was stored under another name
                raw = plain[prefix + path + name]
                resume[prefix + RESUME + path + name] = raw
                if isinstance(correction, FrozenCorrection):
                    kept = module.get_buffer(correction.buffer_name)
                    frozen = plain.pop(prefix + path + correction.buffer_name, kept)
                    resume[prefix + RESUME + path + correction.buffer_name] = frozen
                    effective.setdefault((id(module), name), raw + frozen)
                elif (id(module), name) not in effective:
                    effective[id(module), name] = correction.effective(module, raw)
                plain[prefix + path + name] = effective[id(module), name]
    return plain, resume


def save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
) -> Any:
    """`save_pretrained` of a model of transformers, with effective weights under the plain names.

    What it takes to resume lies beside them, under names that a plain model does not know and leaves out.
    """
    # Trainer resumes with load_state_dict, so keys must be the names in the model. By default, transformers 5 writes
    # those of older versions where they differ (ViT), and Trainer then resumes from weights that were not loaded.
    options.setdefault("save_original_format", False)
    if is_conditioned(model):
        effective, resume = split_state(model, state_dict)
        state_dict = effective | resume
        # Trainer loads shards in any order, one by one; raw weights must come together with the effective ones.
        options.setdefault("max_shard_size", "1000000GB")
    return type(model).save_pretrained(model, save_directory, is_main_process, state_dict, **options)
