"""The autograd graph of an attention's float64 copy, cut behind its projections: one softmax between two products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from wellcond.attention.record import ROLES
from wellcond.jacobian.module import ModuleJacobian
from wellcond.private import product_operands, softmax_result, view_base

LINEAR, CONVOLUTIONS = (F.linear, torch.addmm), (F.conv1d, F.conv2d)
PLAIN = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
BATCH_BYTES = 2**25


class NotTracedError(Exception):
    """The graph is not that of a row-wise attention."""


@dataclass(frozen=True, eq=False)
class Cut:
    """One call of a projection: the tokens that it read (T, in), and its output as a leaf of the graph."""

    tokens: Tensor
    leaf: Tensor
    axis: int

    def pull(self, edge: GradientEdge, cotangent: Tensor) -> Tensor:
        """The VJP from `edge` to the output of this projection, (T, out)."""
        (found,) = torch.autograd.grad(
            edge, self.leaf, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return found.movedim(self.axis, -1).reshape(len(self.tokens), -1)

    def pull_many(self, edge: GradientEdge, cotangents: Tensor) -> Iterator[Tensor]:
        """VJPs of several cotangents, batched where the operations allow it."""
        together = max(1, BATCH_BYTES // (8 * self.leaf.numel()))
        for some in cotangents.split(together):
            try:
                (found,) = torch.autograd.grad(edge, self.leaf, some, retain_graph=True, is_grads_batched=True)
            except (NotImplementedError, RuntimeError):  # an operation that cannot be batched
                yield from (self.pull(edge, one) for one in some)
                continue
            axis = self.axis if self.axis < 0 else self.axis + 1
            yield from found.movedim(axis, -1).reshape(len(some), len(self.tokens), -1)


class CutProjections(TorchFunctionMode):
    """Makes the output of every product with one of these weights a leaf."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """Of the weights as they are stored."""
        super().__init__()
        self.weights = weights
        self.cuts: dict[int, list[Cut]] = {id(weight): [] for weight in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; cut behind it if it is a projection."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in LINEAR and func not in CONVOLUTIONS and func not in PLAIN:
            return out
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        weight = next((w for w in self.weights if any(_is_weight(value, w) for value in given)), None)
        if weight is None:
            return out
        read = args[1] if func is torch.addmm else args[0]
        axis = 1 if func in CONVOLUTIONS and out.dim() > 2 else -1
        tokens = read.detach().movedim(axis, -1)
        leaf = out.detach().requires_grad_()
        self.cuts[id(weight)].append(Cut(tokens.reshape(-1, tokens.shape[-1]), leaf, axis))
        return leaf.clone()  # which may be written into


def _is_weight(value: Tensor, weight: Tensor) -> bool:
    """Whether this is a stored weight, or its transpose."""
    return value is weight or (view_base(value) is weight and weight.dim() == 2 and value.shape == weight.T.shape)


@dataclass(frozen=True, eq=False)
class Product:
    """A product left @ right of the graph, (B, n, c) and (B, c, m), with the edges that lead to its operands."""

    node: Node
    left: Tensor
    right: Tensor
    edges: tuple[GradientEdge, GradientEdge]


def inputs_of(node: Node) -> Iterator[Node]:
    """Nodes that a node's gradients flow to."""
    return (parent for parent, _ in node.next_functions if parent is not None)


def reached(node: Node | None) -> dict[Node, None]:
    """Every node that a node's gradients reach, itself included."""
    found: dict[Node, None] = {}
    waiting = [] if node is None else [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found[one] = None
            waiting.extend(inputs_of(one))
    return found


def _products(nodes: dict[Node, None]) -> Iterator[Product]:
    for node in nodes:
        known = product_operands(node)
        if known is None:
            continue
        left, right, first = known
        edges = node.next_functions[first : first + 2]
        if all(parent is not None for parent, _ in edges):
            left, right = (t if t.dim() == 3 else t[None] for t in (left, right))
            yield Product(node, left, right, tuple(GradientEdge(p, at) for p, at in edges))  # type: ignore[arg-type]


class Trace:
    """The graph of one replayed call, cut behind the projections of Q, K and V."""

    def __init__(self, module: ModuleJacobian) -> None:
        """Run the copy once.

        Raises: NotTracedError if the graph has not the one softmax and the two products of an attention.
        """
        self.module, site = module, module.site
        slots = [site.by_role(role) for role in ROLES]
        stored = [module.stored(slot) for slot in slots]
        with torch.enable_grad(), CutProjections(stored) as watched:
            self.heads = module.run()
        if any(len(cuts) != 1 for cuts in watched.cuts.values()):
            raise NotTracedError("a projection is not called exactly once")
        self.cuts = [watched.cuts[id(weight)][0] for weight in stored]
        if self.heads.grad_fn is None:
            raise NotTracedError("no graph")
        every = reached(self.heads.grad_fn)
        softmaxes = [(node, result) for node in every if (result := softmax_result(node)) is not None]
        if len(softmaxes) != 1:
            raise NotTracedError(f"{len(softmaxes)} softmaxes")
        self.softmax, p = softmaxes[0]
        self.shape = p.shape
        below = reached(self.softmax)
        self.scores = _only(list(_products(below)), "scores")
        self.values = _only(
            [
                product
                for product in _products(every)
                if self.softmax in reached(product.edges[0].node) and self.softmax not in reached(product.edges[1].node)
            ],
            "values",
        )
        B, n, m = *self.scores.left.shape[:2], self.scores.right.shape[2]
        if p.numel() % (B * n) or self.values.left.shape != (B, n, m):
            raise NotTracedError("scores and probabilities differ in shape")
        self.p = p.detach().reshape(B, n, -1)
        if not torch.equal(self.p[..., :m], self.values.left.detach()):
            raise NotTracedError("what multiplies the values is not what the softmax gave")

    def slopes(self) -> Tensor:
        """h'_rj, (B, n, m): what a change of a product of queries and keys does to its logit."""
        product = self.scores.node
        shape = self.shape
        # Rows of cotangents that sum to zero do not see what is subtracted from a whole row (its maximum).
        cotangent = self.p.new_ones(shape)
        cotangent[..., -1] = 1 - shape[-1]
        (found,) = torch.autograd.grad(self.logits, GradientEdge(product, 0), cotangent, retain_graph=True)
        found = found.reshape(*self.p.shape[:2], -1)
        return found / cotangent.reshape(self.p.shape)[..., : found.shape[-1]] if shape[-1] > 1 else found

    @property
    def logits(self) -> GradientEdge:
        """What the softmax reads."""
        node, at = self.softmax.next_functions[0]
        assert node is not None
        return GradientEdge(node, at)

    def positions_multiply_queries(self) -> bool:
        """Whether the logits depend on the queries by more than the product of scores."""
        cotangent = torch.randn(
            self.shape,
            dtype=self.p.dtype,
            generator=torch.Generator().manual_seed(0),
        )
        cotangent = cotangent - cotangent.mean(-1, keepdim=True)
        edge, product = self.logits, self.scores
        (of_product,) = torch.autograd.grad(edge, GradientEdge(product.node, 0), cotangent, retain_graph=True)
        by_product = of_product.reshape(*product.left.shape[:2], -1) @ product.right.detach().mT
        rows = self.module.site.by_role("query").rows.flatten()  # a fused projection makes keys and values as well
        own = self.cuts[0].pull(product.edges[0], by_product.reshape(product.left.shape))[:, rows]
        every = self.cuts[0].pull(edge, cotangent)[:, rows]
        return float((every - own).norm()) > 1e-10 * float(every.norm())


def _only(found: list[Product], what: str) -> Product:
    if len(found) != 1:
        raise NotTracedError(f"{len(found)} products of {what}")
    return found[0]
