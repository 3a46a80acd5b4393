"""What `torch.fx` records where a module that it traces reads a conditioned weight.

Symbolic tracing runs a forward once, with stand-ins (proxies) for its tensors, and writes down what is done to them. A
tensor that is computed meanwhile is stored in the graph as a constant: an effective weight would be frozen there, and
the weight that it was computed from would get no gradient. So the read itself is recorded, and the graph computes W + C
of the present weight whenever it runs:

    blocks_0_attn_qkv = self.blocks.0.attn.qkv
    corrected_weight  = corrected_weight(blocks_0_attn_qkv, 'weight')
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from wellcond.attention.effective import corrections_of
from wellcond.errors import ConditioningError


def corrected_weight(module: nn.Module, name: str) -> Tensor | Proxy:
    """W + C for the parameter W = `name` of `module`; W itself once the model was folded."""
    recorded = recorded_weight(module, name)  # a graph is traced again when it is unpickled
    if recorded is not None:
        return recorded
    raw, correction = module._parameters[name], corrections_of(module).get(name)
    assert raw is not None
    return raw if correction is None else correction.effective(module, raw)


def recorded_weight(module: nn.Module, name: str) -> Proxy | None:
    """The node of the effective weight in the graph that torch.fx is recording; None if it is not recording.

    Raises: ConditioningError if the graph cannot refer to the module, and would keep the weight as a constant.
    """
    # make_fx and torch.export record operators on tensors: nothing is lost to them here.
    if torch.compiler.is_compiling() or not is_fx_symbolic_tracing() or get_proxy_mode() is not None:
        return None
    raw = nn.Module.__getattr__(module, name)  # which a tracer of torch.fx answers with a proxy
    if not isinstance(raw, Proxy) or module is raw.tracer.root:  # type: ignore[attr-defined]
        raise ConditioningError(
            f"torch.fx is tracing a forward that reads the conditioned {name} of a {type(module).__name__}. Its graph "
            "can refer to modules inside of the traced one only, and would keep the weight as a constant without "
            "gradient. Trace a module that contains this one, or call wellcond.fold_(model) first, or trace inside "
            "`with wellcond.folded(model):`"
        )
    return raw.tracer.create_proxy("call_function", corrected_weight, (module, name), {})
