r"""The row-wise operator of an attention, read off the autograd graph of its own float64 copy (theory.md, section 5.4).

    q_r, k_j, v_j        what the projections put out; here the graph is cut
    qhat_r = f_r(q_r)    left operand of the product of scores: norms, rotations, factors, clamps, in any order
    khat_j = f_j(k_j)    right operand; vhat_j = f_j(v_j) that of the product with the probabilities
    S_rj = h_rj(qhat_r . khat_j), and q_r . r_rj where positions r_rj multiply the queries
    P = softmax of the rows of S,  o_r = sum_j P_rj vhat_j,  what W_O reads: g_r(o_r)

Values, the Jacobians of f_r, f_j, g_r and the slopes h'_rj are taken from the graph, so that cos, sin, scales, caps and
masks are those that the model used. Which token made which row is found by pulling back numbered rows: a row of a
projection that feeds row i of an operand, and no other, receives i times what it receives from unnumbered rows.

Nothing here is believed by itself: the operator is compared with the module's own products by `select_operator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from wellcond.attention.record import ROLES
from wellcond.attention.slot import Slot
from wellcond.jacobian.graph import Cut, NotTracedError, Trace
from wellcond.jacobian.head import Head
from wellcond.jacobian.module import ModuleJacobian
from wellcond.jacobian.operator import MappedRows
from wellcond.jacobian.rowwise import RowSoftmax, RowwiseHead, TokenMap

MOST_ENTRIES = 2**27  # of a derivative for every row, key and channel: 1 GiB
NUMBERED = 1e-6  # how far a number that is read off a quotient may be from the rounded one, relative to it


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
    """The Jacobians (g, g, N, dv', dv) of what W_O reads of a group by its rows; None if nothing happens to them."""
    dv = trace.values.right.shape[2]
    maps = trace.heads.new_empty(len(rows), len(rows), len(trace.heads), columns.shape[1], dv)
    unit = torch.eye(columns.shape[1], dtype=maps.dtype)
    for head, own in enumerate(columns):
        for channel, row in enumerate(unit):
            pulled = _pull_outputs(trace, own, row.expand(len(trace.heads), -1))
            for other, at in enumerate(rows):
                maps[head, other, :, channel] = pulled[at]
    same = torch.eye(len(rows), dtype=maps.dtype)[:, :, None, None, None]
    if columns.shape[1] == dv and bool((maps == same * torch.eye(dv, dtype=maps.dtype)).all()):
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


class _Transposed:
    """An operand as (B, m, c), whose cotangents are handed on as the (B, c, m) that the graph has."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut

    def pull(self, edge: GradientEdge, cotangent: Tensor) -> Tensor:
        return self.cut.pull(edge, cotangent.mT)

    def pull_many(self, edge: GradientEdge, cotangents: Tensor) -> Iterator[Tensor]:
        return self.cut.pull_many(edge, cotangents.mT)


def trace_rowwise(module: ModuleJacobian, *, biases: bool = False) -> RowwiseHead | MappedRows:
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
        probabilities.append(torch.cat([p, _outside(trace, rows)], 1) if trace.p.shape[-1] > m else p)
        slopes.append(all_slopes[picked] * own)
    if any(not torch.equal(of_q.tokens[tokens], of_q.tokens[q_tokens[0]]) for tokens in q_tokens):
        raise NotTracedError("query heads of a group read different tokens")
    by_query = None
    if trace.positions_multiply_queries():
        each = zip(group, q_tokens, strict=True)
        by_query = torch.cat([_by_query(trace, memory, tokens, query.rows[number]) for number, tokens in each])
    real = memory.tokens[: len(memory.tokens) - memory.tokenless]
    y, z = (torch.nn.functional.pad(cut.tokens[real], (0, 0, 0, memory.tokenless)) for cut in (of_k, of_v))
    key_map = _memory_map(of_k, trace.scores.edges[1], khat, memory, key.rows[kv_head])
    value_map = _memory_map(of_v, trace.values.edges[1], vhat, memory, value.rows[kv_head], transposed=False)
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
    return operator if maps is None else MappedRows(operator, maps, module.output().detach())


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
    of_keys = _tokens_behind(_Transposed(cut_k), trace.scores.edges[1], khat, at, site.by_role("key").rows[kv_head])  # type: ignore[arg-type]
    of_values = _tokens_behind(cut_v, trace.values.edges[1], vhat, at, site.by_role("value").rows[kv_head])
    if not torch.equal(of_keys, of_values):
        raise NotTracedError("a key and its value are made of different tokens")
    if bool((of_keys < 0).all()):
        raise NotTracedError("no key is made of a token")
    order = torch.where(of_keys < 0, len(cut_k.tokens), of_keys).argsort(stable=True)
    return MemoryRows(at[order], of_keys[order])


def _same(rows: Tensor, seen: MemoryRows, memory: MemoryRows) -> bool:
    return torch.equal(rows.flatten(0, 1)[seen.rows], rows.flatten(0, 1)[memory.rows])


def _outside(trace: Trace, rows: Tensor) -> Tensor:
    """Probability of what is no key: attention sinks, (rows, count)."""
    m = trace.scores.right.shape[2]
    return trace.p.flatten(0, 1)[rows, m:]


def _memory_map(
    cut: Cut, edge: GradientEdge, rows: Tensor, memory: MemoryRows, slot_rows: Tensor, *, transposed: bool = True
) -> tuple[Tensor, Tensor]:
    """Mapped keys (or values) and their Jacobians, zero for those that no token makes."""
    count = len(memory.tokens) - memory.tokenless
    puller: Any = _Transposed(cut) if transposed else cut
    at, tokens = memory.rows[:count], memory.tokens[:count]
    found = _jacobians(puller, edge, rows, at, tokens, slot_rows)
    zeros = found.new_zeros(memory.tokenless, *found.shape[1:])
    return rows.flatten(0, 1)[memory.rows], torch.cat([found, zeros])


def _rows(module: ModuleJacobian, slot: Slot, heads: Sequence[int]) -> Tensor:
    return slot.as_matrix(module.stored(slot).detach())[slot.rows[list(heads)]]


def _bias(slot: Slot, heads: Any) -> Tensor | None:
    bias = slot.read_bias()
    return None if bias is None else bias.detach().cpu().double()[heads]
