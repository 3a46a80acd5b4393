"""Compiled models and kernels that are not torch's: what is seen, what is not, and that the numbers stay."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellcond as wc
from attention.modern import TwoStreams
from training.test_monitor import IMAGES, loss_of, read_once, vit


def gradients(model, forward):
    loss = loss_of(forward)
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of dynamo
@pytest.mark.parametrize("how", ["wrapper", "in place", "blocks"])
def test_a_compiled_model_keeps_its_graph_and_its_numbers(how):
    """Compiled code calls no hooks: nothing of it is seen but the weights, and nothing is compiled again."""
    torch.manual_seed(0)
    model = vit().train()
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    compiled = model
    if how == "wrapper":
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    for part in {"in place": [model], "blocks": model.blocks}.get(how, []):
        part.compile(backend=backend, fullgraph=True)
    expected = gradients(model, compiled)
    count = len(graphs)
    monitor = wc.AttentionMonitor(compiled, every=2, weights_every=1)
    for _ in range(3):
        seen = gradients(model, compiled)
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
        monitor.step()
    assert len(graphs) == count
    frame = monitor.to_frame()
    assert frame[["max_logit", "entropy", "q_norm"]].isna().all().all() and frame["kappa_q"].notna().all()
    assert all("torch.compile" in why["max_logit"] for why in monitor.not_seen.values())
    torch._dynamo.reset()


def test_a_model_that_is_compiled_later_keeps_its_numbers():
    torch.manual_seed(0)
    model = vit().train()
    torch._dynamo.reset()
    expected = gradients(model, model)
    monitor = wc.AttentionMonitor(model, every=2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(3):
        seen = gradients(model, compiled)
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
        monitor.step()
    torch._dynamo.reset()


def test_a_copy_of_a_model_that_is_watched_is_not_watched():
    model = vit().train()
    monitor = wc.AttentionMonitor(model, every=1)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    loss_of(twin).backward()
    assert all(one.isnan().all() for one in monitor.max_logits().values())
    loss_of(model).backward()
    assert not any(one.isnan().any() for one in monitor.max_logits().values())


@torch.library.custom_op("wellcond_monitor::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    logits = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.zeros(())
    logits = logits.masked_fill(hidden.bool(), -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@torch.library.custom_op("wellcond_monitor::attend_sharply", mutates_args=())
def attend_sharply(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = 3 * q @ k.mT / q.shape[-1] ** 0.5  # not as its arguments say
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def _differentiable(operator):
    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])
        ctx.more = inputs[3:]

    def backward(context, out, _):
        with torch.enable_grad():
            parts = [part.detach().requires_grad_() for part in context.saved_tensors]
            again = F.scaled_dot_product_attention(*parts, is_causal=any(context.more))
        return (*torch.autograd.grad(again, parts, out), *(None for _ in context.more))

    operator.register_autograd(backward, setup_context=setup)


_differentiable(attend)
_differentiable(attend_sharply)


class Attention(nn.Module):
    def __init__(self, operator, *options):
        super().__init__()
        self.num_heads, self.head_dim, self.operator, self.options = 4, 6, operator, options
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x):
        parts = (part(x).unflatten(-1, (4, 6)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.operator(*parts, *self.options)[0].transpose(1, 2).flatten(2))


X = torch.randn(2, 20, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("causal", [True, False])
def test_the_log_sum_exp_of_a_foreign_operator_is_checked_on_some_rows(causal):
    torch.manual_seed(0)
    layer = Attention(attend, causal)
    plain = Attention(
        lambda q, k, v, is_causal: (F.scaled_dot_product_attention(q, k, v, is_causal=is_causal),), causal
    )
    plain.load_state_dict(layer.state_dict())
    frame, monitor = read_once(layer, lambda model: model(X).sum().backward())
    same, _ = read_once(plain, lambda model: model(X).sum().backward())
    for name in ("max_logit", "max_logit_low", "first_share", "self_share", "logit_std", "q_norm", "v_norm"):
        torch.testing.assert_close(torch.tensor(frame[name]), torch.tensor(same[name]), rtol=1e-5, atol=1e-5)
    assert frame["entropy"].isna().all() and "second time" in monitor.not_seen[""]["entropy"]


def test_a_log_sum_exp_that_is_none_is_not_believed():
    torch.manual_seed(0)
    frame, monitor = read_once(Attention(attend_sharply), lambda model: model(2 * X).sum().backward())
    assert frame[["max_logit", "logit_std", "first_share"]].isna().all().all() and frame["q_norm"].notna().all()
    assert "is not the log-sum-exp" in monitor.not_seen[""]["max_logit"]


def test_observing_never_calls_the_operator_again():
    calls = []

    class Counted(Attention):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    layer = Counted(attend, False)
    monitor = wc.AttentionMonitor(layer.train(), every=1)
    calls.clear()
    layer(X).sum().backward()
    monitor.step()
    assert len(calls) == 1 and IMAGES.shape[0] == 4


class Packed(Attention):
    """Sequences of several lengths without padding, as nested tensors."""

    def __init__(self, layout, operator):
        super().__init__(operator)
        self.layout = layout

    def forward(self, x):
        lengths = (20, 7)
        parts = [part(x) for part in (self.q_proj, self.k_proj, self.v_proj)]
        nested = [
            torch.nested.as_nested_tensor(
                [one[:length].unflatten(-1, (4, 6)) for one, length in zip(part, lengths, strict=True)],
                layout=self.layout,
            )
            for part in parts
        ]
        nested = [part.transpose(1, 2) for part in nested]
        if self.layout == torch.strided:
            nested = [part.contiguous() for part in nested]
        out = self.operator(*nested).transpose(1, 2).unbind()
        return torch.cat([self.o_proj(one.flatten(-2)) for one in out])


def _products(q, k, v):
    return (q @ k.transpose(-1, -2) / 6**0.5).softmax(-1) @ v


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "layout, operator",
    [
        (torch.strided, F.scaled_dot_product_attention),
        (torch.strided, _products),
        (torch.jagged, F.scaled_dot_product_attention),
    ],
    ids=["strided, sdpa", "strided, products", "jagged, sdpa"],
)
def test_nested_tensors_are_not_seen_and_not_disturbed(layout, operator):
    torch.manual_seed(0)
    layer = Packed(layout, operator)
    expected = layer(X)
    seen = []
    frame, monitor = read_once(layer, lambda model: seen.append(model(X)))
    assert torch.equal(seen[0], expected)
    seen[0].sum().backward()
    assert frame[["max_logit", "entropy", "q_norm"]].isna().all().all() and frame["kappa_q"].notna().all()
    assert "nested" in monitor.not_seen[""]["max_logit"]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@torch.no_grad()  # on a CPU it has no backward pass
def test_flex_attention_is_not_seen_and_not_disturbed():
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    layer = Attention(lambda q, k, v: (flex_attention(q, k, v),))
    plain = Attention(lambda q, k, v: (F.scaled_dot_product_attention(q, k, v),))
    plain.load_state_dict(layer.state_dict())
    expected = layer(X)
    torch.testing.assert_close(expected, plain(X))
    seen = []
    frame, monitor = read_once(layer, lambda model: seen.append(model(X)))
    assert torch.equal(seen[0], expected)
    assert frame[["max_logit", "entropy", "q_norm"]].isna().all().all() and frame["kappa_q"].notna().all()
    assert "flex_attention" in monitor.not_seen[""]["max_logit"]


@pytest.mark.parametrize("name", ["", "attn"])
def test_the_second_stream_of_an_attention_layer_is_said_to_be_one(name):
    model = nn.ModuleDict({name: TwoStreams()}) if name else TwoStreams()
    batch = torch.randn(1, 5, 32), torch.randn(1, 4, 24)
    frame, monitor = read_once(model, lambda _: (model[name] if name else model)(*batch)[0].sum().backward())
    first, second = monitor.sites
    assert "max_logit" not in monitor.not_seen.get(first.name, {})
    assert "second stream" in monitor.not_seen[second.name]["max_logit"]
