r"""The row-wise operator of an attention, read off the autograd graph of its own float64 copy (theory.md, section 5.4).

The graph is cut behind the projections of Q, K and V. Values, the Jacobians of what is done to their rows (norms,
rotations, factors, clamps) and the slopes of the logits are taken from it, so that cos, sin, scales, caps and masks are
those that the model used. Which token made which row is found by pulling back numbered rows: a row of a projection that
feeds row i of an operand, and no other, receives i times what it receives from unnumbered rows.

Nothing here is believed by itself: the operator is compared with the module's own products by `select_operator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from wellcond.attention.record import ROLES
from wellcond.attention.slot import Slot
from wellcond.jacobian.head import Head
from wellcond.jacobian.module import ModuleJacobian
from wellcond.jacobian.operator import MappedOutputs
from wellcond.jacobian.rowwise import RowwiseHead
from wellcond.jacobian.softmax import RowSoftmax, TokenMap
from wellcond.private import product_operands, softmax_result, view_base

LINEAR, CONVOLUTIONS = (F.linear, torch.addmm), (F.conv1d, F.conv2d)
PLAIN = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
BATCH_BYTES = 2**25
MOST_ENTRIES = 2**27  # of a derivative for every row, key and channel: 1 GiB
NUMBERED = 1e-6  # how far a number that is read off a quotient may be from the rounded one, relative to it


class NotTracedError(Exception):
    """The graph is not that of a row-wise attention."""


@dataclass(frozen=True, eq=False)
class Cut:
    """One call of a projection: the tokens that it read (T, in), and its output as a leaf of the graph."""

    tokens: Tensor
    leaf: Tensor
    axis: int
    turned: bool = False
    """Cotangents are those of an operand that the graph has transposed."""

    def pull(self, edge: GradientEdge, cotangent: Tensor) -> Tensor:
        """The VJP from `edge` to the output of this projection, (T, out)."""
        given = cotangent.mT if self.turned else cotangent
        (found,) = torch.autograd.grad(
            edge, self.leaf, given, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return found.movedim(self.axis, -1).reshape(len(self.tokens), -1)

    def pull_many(self, edge: GradientEdge, cotangents: Tensor) -> Iterator[Tensor]:
        """VJPs of several cotangents, batched where the operations allow it."""
        together = max(1, BATCH_BYTES // (8 * self.leaf.numel()))
        for some in cotangents.split(together):
            try:
                given = some.mT if self.turned else some
                (found,) = torch.autograd.grad(edge, self.leaf, given, retain_graph=True, is_grads_batched=True)
            except (NotImplementedError, RuntimeError):  # an operation that cannot be batched
                yield from (self.pull(edge, one) for one in some)
                continue
            axis = self.axis if self.axis < 0 else self.axis + 1
            yield from found.movedim(axis, -1).reshape(len(some), len(self.tokens), -1)


class CutProjections(TorchFunctionMode):
    """Makes the output of every product with one of these weights a leaf."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = weights
        self.cuts: dict[int, list[Cut]] = {id(weight): [] for weight in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        cotangent = torch.randn(self.shape, dtype=self.p.dtype, generator=torch.Generator().manual_seed(0))
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


def _numbers(plain: Tensor, numbered: Tensor) -> Tensor:
    """The number of each row (T, c) that was pulled back with and without numbers; -1 where nothing arrives."""
    best = plain.abs().argmax(-1, keepdim=True)
    largest = plain.gather(-1, best)
    number = torch.where(largest == 0, 0.0, numbered.gather(-1, best) / torch.where(largest == 0, 1.0, largest))
    whole = number.round()
    off = (numbered - whole * plain).abs().amax(-1)
    if bool((off > NUMBERED * whole[..., 0].abs() * largest[..., 0].abs()).any()):
        raise NotTracedError("rows are mixed")
    return whole[..., 0].long() - 1


def _inverse(numbers: Tensor, count: int) -> Tensor:
    """Where each number 0 .. count-1 stands; -1 if nowhere.

    Raises: NotTracedError if one stands at several places.
    """
    places = (numbers >= 0).nonzero()[:, 0]
    found = torch.full((count,), -1)
    found[numbers[places]] = places
    if len(numbers[places].unique()) != len(places):
        raise NotTracedError("several tokens make one row")
    return found


def _weights_of_channels(width: int) -> Tensor:
    return 1 + torch.rand(width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _jacobians(cut: Cut, edge: GradientEdge, like: Tensor, at: Tensor, tokens: Tensor, slot_rows: Tensor) -> Tensor:
    """The Jacobians (count, c, d) of operand rows `at` (of like.flatten(0, 1)) by the rows of their own tokens."""
    width = like.shape[-1]
    found = like.new_empty(len(at), width, len(slot_rows))
    cotangents = like.new_zeros(width, *like.shape)
    channels = torch.arange(width)
    cotangents.flatten(1, 2)[channels[:, None], at, channels[:, None]] = 1.0
    for channel, pulled in enumerate(cut.pull_many(edge, cotangents)):
        found[:, channel] = pulled[tokens][:, slot_rows]
    return found


def _pull_outputs(trace: Trace, columns: Tensor, cotangent: Tensor) -> Tensor:
    """Cotangents (B n, dv) of the product with the values, of those of some columns of what W_O reads."""
    spread = torch.zeros_like(trace.heads).index_copy(1, columns, cotangent)
    (found,) = torch.autograd.grad(
        trace.heads,
        GradientEdge(trace.values.node, 0),
        spread,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return found.reshape(-1, trace.values.right.shape[2])


def output_rows(trace: Trace, columns: Tensor) -> Tensor:
    """The rows (of B n) of the product with the values that one head's outputs are made of."""
    count = len(trace.heads)
    u = _weights_of_channels(len(columns)).expand(count, -1)
    plain = _pull_outputs(trace, columns, u)
    numbered = _pull_outputs(trace, columns, u * torch.arange(1.0, count + 1, dtype=u.dtype)[:, None])
    numbers = _numbers(plain, numbered)
    # A norm over all heads makes an output of the rows of all of them, its own most of all.
    strength = plain.norm(dim=-1)
    strongest = torch.zeros(count, dtype=u.dtype).scatter_reduce(0, numbers.clamp_min(0), strength, "amax")
    rows = _inverse(torch.where((numbers >= 0) & (strength < strongest[numbers]), -1, numbers), count)
    if bool((rows < 0).any()):
        raise NotTracedError("an output is made of no row")
    return rows


def output_maps(trace: Trace, columns: Tensor, rows: Sequence[Tensor]) -> Tensor | None:
    """The Jacobians (N, g, dv', g, dv) of what W_O reads of a group by its rows; None if nothing happens to them."""
    g, dv = len(rows), trace.values.right.shape[2]
    maps = trace.heads.new_empty(len(trace.heads), g, columns.shape[1], g, dv)
    unit = torch.eye(columns.shape[1], dtype=maps.dtype)
    for head, own in enumerate(columns):
        for channel, row in enumerate(unit):
            pulled = _pull_outputs(trace, own, row.expand(len(trace.heads), -1))
            for other, at in enumerate(rows):
                maps[:, head, channel, other] = pulled[at]
    if columns.shape[1] == dv and bool((maps.flatten(3).flatten(1, 2) == torch.eye(g * dv, dtype=maps.dtype)).all()):
        return None
    return maps.detach()


def _tokens_behind(cut: Cut, edge: GradientEdge, like: Tensor, at: Tensor, slot_rows: Tensor) -> Tensor:
    """The token of each operand row `at`; -1 where no token makes it."""
    u = _weights_of_channels(like.shape[-1])
    cotangent = like.new_zeros(like.shape)  # contiguous, so that flatten is a view
    cotangent.flatten(0, 1)[at] = u
    plain = cut.pull(edge, cotangent)[:, slot_rows]
    cotangent.flatten(0, 1)[at] = u * torch.arange(1.0, len(at) + 1, dtype=u.dtype)[:, None]
    return _inverse(_numbers(plain, cut.pull(edge, cotangent)[:, slot_rows]), len(at))


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """The key rows (of B m) that one query head sees, tokens first; their tokens, -1 where no token makes them."""

    rows: Tensor
    tokens: Tensor

    @property
    def tokenless(self) -> int:
        """Rows that no token makes."""
        return int((self.tokens < 0).sum())


def trace_rowwise(module: ModuleJacobian, *, biases: bool = False) -> RowwiseHead | MappedOutputs:
    """The row-wise operator of a head that is known by its module.

    Raises: NotTracedError, with the reason, if its attention has none.
    """
    trace = Trace(module)
    site, kv_head = module.site, module.kv_head
    query, key, value = (site.by_role(role) for role in ROLES)
    group = range(site.num_heads)[module.group]
    of_q, of_k, of_v = trace.cuts
    n, m = trace.scores.left.shape[1], trace.scores.right.shape[2]
    outputs = [output_rows(trace, columns) for columns in module.columns]
    if len(outputs) != len(group):
        raise NotTracedError("heads are mixed before they leave the module")
    left, khat, vhat = trace.scores.left.detach(), trace.scores.right.detach().mT, trace.values.right.detach()
    q_tokens: list[Tensor] = []
    query_values, query_jacobians, probabilities, slopes = [], [], [], []
    memory = _memory(trace, outputs[0], kv_head)
    all_slopes = trace.slopes()
    for number, rows in zip(group, outputs, strict=True):
        tokens = _tokens_behind(of_q, trace.scores.edges[0], left, rows, query.rows[number])
        if bool((tokens < 0).any()):
            raise NotTracedError("a query is made of no token")
        q_tokens.append(tokens)
        query_values.append(left.flatten(0, 1)[rows])
        query_jacobians.append(_jacobians(of_q, trace.scores.edges[0], left, rows, tokens, query.rows[number]))
        seen = memory if rows is outputs[0] else _memory(trace, rows, kv_head)
        if (
            not torch.equal(seen.tokens, memory.tokens)
            or not _same(khat, seen, memory)
            or not _same(vhat, seen, memory)
        ):
            raise NotTracedError("query heads of a group see different keys")
        batch, column = seen.rows // m, seen.rows % m
        own = batch[None, :] == (rows // n)[:, None]
        picked = (rows // n)[:, None], (rows % n)[:, None], column[None, :]
        p = trace.p[picked] * own
        probabilities.append(torch.cat([p, trace.p.flatten(0, 1)[rows, m:]], 1))  # with attention sinks
        slopes.append(all_slopes[picked] * own)
    if any(not torch.equal(of_q.tokens[tokens], of_q.tokens[q_tokens[0]]) for tokens in q_tokens):
        raise NotTracedError("query heads of a group read different tokens")
    by_query = None
    if trace.positions_multiply_queries():
        each = zip(group, q_tokens, strict=True)
        by_query = torch.cat([_by_query(trace, memory, tokens, query.rows[number]) for number, tokens in each])
    real = memory.tokens[: len(memory.tokens) - memory.tokenless]
    y, z = (torch.nn.functional.pad(cut.tokens[real], (0, 0, 0, memory.tokenless)) for cut in (of_k, of_v))
    key_map = _memory_map(replace(of_k, turned=True), trace.scores.edges[1], khat, memory, key.rows[kv_head])
    value_map = _memory_map(of_v, trace.values.edges[1], vhat, memory, value.rows[kv_head])
    x = of_q.tokens[q_tokens[0]]
    head = Head(
        x,
        _rows(module, query, group),
        _rows(module, key, [kv_head])[0],
        _rows(module, value, [kv_head])[0],
        1.0,
        y=None if torch.equal(x, y) else y,
        **{
            name: _bias(slot, heads)
            for name, slot, heads in (("b_q", query, list(group)), ("b_k", key, kv_head), ("b_v", value, kv_head))
        },
    )
    operator = RowwiseHead(
        head,
        TokenMap(torch.stack(query_values), torch.stack(query_jacobians)),
        TokenMap(*key_map),
        RowSoftmax(
            torch.cat(probabilities),
            torch.cat(slopes),
            TokenMap(*value_map),
            memory.tokenless,
            None if torch.equal(y, z) else z,
            by_query,
        ),
        biases,
    )
    maps = output_maps(trace, module.columns, outputs)
    if maps is None:
        return operator
    return MappedOutputs((operator,), (maps,), len(x), value=module.output().detach())


def _by_query(trace: Trace, memory: MemoryRows, tokens: Tensor, slot_rows: Tensor) -> Tensor:
    """D_rj = dS_rj / dq_r of one query head, (N, M, d), up to what is the same for all keys of a row."""
    if trace.p.shape[-1] != trace.scores.right.shape[2] or len(memory.rows) != trace.p.shape[-1]:
        raise NotTracedError("positions multiply the queries, and not every key of a row is a token")
    if len(tokens) * len(memory.rows) * len(slot_rows) > MOST_ENTRIES:
        raise NotTracedError("positions multiply the queries of too many tokens")
    shape = trace.shape
    found = trace.p.new_zeros(len(tokens), len(memory.rows), len(slot_rows))
    for at, column in enumerate((memory.rows % shape[-1]).tolist()):
        cotangent = trace.p.new_zeros(shape)
        cotangent[..., column] = 1.0
        cotangent[..., -1] -= 1.0
        found[:, at] = trace.cuts[0].pull(trace.logits, cotangent)[tokens][:, slot_rows]
    return found


def _memory(trace: Trace, output: Tensor, kv_head: int) -> MemoryRows:
    """Keys in the batches of one query head, in the order of the tokens that make them."""
    n, m = trace.scores.left.shape[1], trace.scores.right.shape[2]
    batches = (output // n).unique()
    at = (batches[:, None] * m + torch.arange(m)).flatten()
    site = trace.module.site
    cut_k, cut_v = trace.cuts[1:]
    khat, vhat = trace.scores.right.detach().mT, trace.values.right.detach()
    of_keys = _tokens_behind(
        replace(cut_k, turned=True), trace.scores.edges[1], khat, at, site.by_role("key").rows[kv_head]
    )
    of_values = _tokens_behind(cut_v, trace.values.edges[1], vhat, at, site.by_role("value").rows[kv_head])
    if not torch.equal(of_keys, of_values):
        raise NotTracedError("a key and its value are made of different tokens")
    if bool((of_keys < 0).all()):
        raise NotTracedError("no key is made of a token")
    order = torch.where(of_keys < 0, len(cut_k.tokens), of_keys).argsort(stable=True)
    return MemoryRows(at[order], of_keys[order])


def _same(rows: Tensor, seen: MemoryRows, memory: MemoryRows) -> bool:
    return torch.equal(rows.flatten(0, 1)[seen.rows], rows.flatten(0, 1)[memory.rows])


def _memory_map(
    cut: Cut, edge: GradientEdge, rows: Tensor, memory: MemoryRows, slot_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Mapped keys (or values) and their Jacobians, zero for those that no token makes."""
    count = len(memory.tokens) - memory.tokenless
    at, tokens = memory.rows[:count], memory.tokens[:count]
    found = _jacobians(cut, edge, rows, at, tokens, slot_rows)
    zeros = found.new_zeros(memory.tokenless, *found.shape[1:])
    return rows.flatten(0, 1)[memory.rows], torch.cat([found, zeros])


def _rows(module: ModuleJacobian, slot: Slot, heads: Sequence[int]) -> Tensor:
    return slot.as_matrix(module.stored(slot).detach())[slot.rows[list(heads)]]


def _bias(slot: Slot, heads: Any) -> Tensor | None:
    bias = slot.read_bias()
    return None if bias is None else bias.detach().cpu().double()[heads]
