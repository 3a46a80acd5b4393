"""Private names of torch and other libraries that wellcond relies on, in one place, with what they were tried on.

Every function says what it needs, why no public name serves, and with which versions it was tried. Code elsewhere in
wellcond uses public names only.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

# Operands of a product in its node of the autograd graph, and which of the node's inputs they are.
_PRODUCTS = {
    "BmmBackward0": ("_saved_self", "_saved_mat2", 0),
    "MmBackward0": ("_saved_self", "_saved_mat2", 0),
    "BaddbmmBackward0": ("_saved_batch1", "_saved_batch2", 1),
}


def product_operands(node: Node) -> tuple[Tensor, Tensor, int] | None:
    """Both operands of a node of a matrix product, and the number of its first input; None for another node.

    Needs the names of autograd nodes and their `_saved_*` tensors: `torch.autograd.graph` gives nodes and edges, but
    not what they multiply. Where a name changes, an attention is differentiated through its module instead. Tried with
    torch 2.15.
    """
    known = _PRODUCTS.get(node.name().split("::")[-1])
    return None if known is None else (getattr(node, known[0]), getattr(node, known[1]), known[2])


def softmax_result(node: Node) -> Tensor | None:
    """What the node of a softmax put out; None for another node.

    Needs the name of the node and its `_saved_result`, as `product_operands` does. Tried with torch 2.15.
    """
    if "SoftmaxBackward" not in node.name() or "Log" in node.name():
        return None
    return node._saved_result  # type: ignore[attr-defined]


def view_base(tensor: Tensor) -> Tensor | None:
    """The tensor that a view is a view of; None if it is none.

    Needs `Tensor._base`: that two tensors share memory can be asked in public, which one the other is a view of cannot.
    Tried with torch 2.15.
    """
    return tensor._base
