"""PEFT writes through `layer.weight.data`, which of a conditioned layer is computed anew: the write would be lost.

Merging an adapter would then silently drop what was trained. Before it writes, PEFT asks the layer for its
`base_layer`, to see through layers of its own; that question is where it can be stopped.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from torch import nn

from wellcond.errors import ConditioningError

# Methods of PEFT's layers that write into the weight of the layer below, or (`target_parameters`) take it away.
WRITERS = {"merge", "_merge", "unmerge", "_unmerge", "pissa_init", "corda_init", "olora_init", "loftq_init",
           "lora_ga_init", "_truncate_base_weight", "_activate_lora", "_restore_weights",
           "unload_and_optionally_merge_module", "set_base_weight"}  # fmt: skip


def refuse_lost_writes(module: nn.Module) -> NoReturn:
    """The attribute `base_layer` of a conditioned layer: there is none, as PEFT expects of a layer not its own.

    Raises: ConditioningError if it is asked for in order to write into the weight.
    """
    asking = sys._getframe(1)  # BaseTunerLayer.get_base_layer
    caller = asking.f_back
    if asking.f_code.co_name == "get_base_layer" and caller is not None and caller.f_code.co_name in WRITERS:
        raise ConditioningError(
            f"PEFT's {caller.f_code.co_name} would write into a conditioned weight, where it would be lost; nothing "
            "was written. Call wellcond.fold_(model) first: the adapter freezes the weight, so that its correction is "
            "constant and outputs stay as they are."
        )
    raise AttributeError(f"{type(module).__name__!r} object has no attribute 'base_layer'")
