"""What other libraries must not do to a conditioned weight, noticed at the last question they ask before they do it.

PEFT asks a layer for its `base_layer`, to see through layers of its own, before it writes into the weight. torch's
`weight_norm` and parametrisations read the weight before they take it away.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from torch import nn

from wellcond.errors import ConditioningError

# Methods of PEFT's layers that write into the weight of the layer below, or (`target_parameters`) take it away.
WRITERS = {"merge", "_merge", "unmerge", "_unmerge", "pissa_init", "corda_init", "olora_init", "loftq_init",
           "lora_ga_init", "_truncate_base_weight", "_activate_lora", "_restore_weights",
           "unload_and_optionally_merge_module", "set_base_weight"}  # fmt: skip

# Functions of torch.nn.utils that move a parameter elsewhere, by file and name.
REPARAMETRISERS = {("weight_norm.py", "apply"), ("parametrize.py", "register_parametrization")}


def refuse_merging(module: nn.Module) -> NoReturn:
    """The attribute `base_layer` of a conditioned layer: there is none, as PEFT expects of a layer not its own.

    Raises: ConditioningError if it is asked for in order to write into the weight.
    """
    asking = sys._getframe(1)  # BaseTunerLayer.get_base_layer
    caller = asking.f_back
    if caller is not None and caller.f_code.co_name == "get_base_weight":
        caller = caller.f_back
    if asking.f_code.co_name == "get_base_layer" and caller is not None and caller.f_code.co_name in WRITERS:
        raise ConditioningError(
            f"PEFT's {caller.f_code.co_name} would write into a conditioned weight, whose correction would then be "
            "that of another weight; nothing was written. Call wellcond.fold_(model) first: the adapter freezes the "
            "weight, so that its correction is constant and outputs stay as they are."
        )
    raise AttributeError(f"{type(module).__name__!r} object has no attribute 'base_layer'")


def refuse_reparametrisation(name: str) -> None:
    """Called by the property that reads a conditioned weight.

    Raises: ConditioningError if it is read in order to be taken away.
    """
    reader = sys._getframe(2).f_code
    if (os.path.basename(reader.co_filename), reader.co_name) in REPARAMETRISERS:
        raise reparametrised(name)


def reparametrised(name: str) -> ConditioningError:
    """The error for a weight that would be taken away."""
    return ConditioningError(
        f"{name} is conditioned and must stay a parameter of its module, so weight_norm, spectral_norm and other "
        "parametrisations cannot be put on it; nothing was changed. Call wellcond.fold_(model) first, or leave the "
        "attention out with sites=..."
    )
