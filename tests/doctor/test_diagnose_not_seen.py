"""Attention whose softmax is not seen: kernels of other libraries, flex_attention, layers that are not called."""

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import wellcond as wc
from models import changes, unchanged

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@torch.library.custom_op("wellcond_tests::packed", mutates_args=())
def packed(qkv: torch.Tensor) -> torch.Tensor:
    """An operator that dispatch modes cannot look into, and whose arguments are not queries, keys and values."""
    q, k, v = qkv.unbind(0)
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def kernel(q, k, v):
    return packed(torch.stack([q, k, v]))


def flex(q, k, v):
    """With a score_mod that is a function of one position only."""
    return flex_attention.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + torch.stack([i, j]).sum())


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.num_heads, self.attend = 4, attend
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(32), Attention(attend), nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.norm(x))


def model_with(attend):
    return nn.Sequential(Block(nn.functional.scaled_dot_product_attention), Block(attend))


KERNELS = {"wellcond_tests.packed": kernel, "flex_attention": flex}


def test_a_kernel_whose_logits_follow_from_its_arguments_is_seen():
    torch.manual_seed(0)
    found = wc.diagnose(model_with(flex_attention.flex_attention), torch.randn(2, 6, 32))
    assert found.findings == () and all(layer.entropy > 0 and layer.not_seen == () for layer in found.layers)


@pytest.fixture(params=KERNELS)
def hidden(request):
    torch.manual_seed(0)
    return request.param, model_with(KERNELS[request.param])


def test_the_doctor_says_what_it_did_not_see(hidden):
    name, model = hidden
    found = wc.diagnose(model, torch.randn(2, 6, 32))
    seen, unseen = found.layers
    assert seen.not_seen == () and seen.logit_spread > 0 and not seen.logits_hidden
    assert unseen.logits_hidden and unseen.logit_spread is None and unseen.entropy is None
    [reason] = unseen.not_seen
    assert "no softmax was visible" in reason and name in reason
    [finding] = found.findings
    assert finding.kind == "not-seen" and finding.layers == ("1.attn",) and name in finding.verdict
    text = " ".join(str(found).split())
    assert "Nothing to fix" not in text and "Not seen: of 1.attn" in text and "logits not seen" in text
    assert "logits not seen" in found.to_html() and name in found.to_html()
    assert wc.Diagnosis.from_json(found.to_json()) == found and name in found.to_json()


def test_calibrated_refuses_what_it_cannot_see(hidden):
    name, model = hidden
    with unchanged(model), pytest.raises(wc.WeightError, match=r"1\.attn: .*sdpa.*logits=None") as error:
        wc.init_(model, "calibrated", batch=torch.randn(2, 6, 32))
    assert name in str(error.value)


def test_calibrated_without_the_logits(hidden):
    _, model = hidden
    batch = torch.randn(2, 6, 32)
    with changes(model) as changed:
        wc.init_(model, "calibrated", batch=batch, logits=None)
    assert changed == {name for name in model.state_dict() if "o_proj" in name or "mlp" in name}
    shares = [layer.attention_share for layer in wc.diagnose(model, batch).layers]
    assert shares == [pytest.approx(0.15, rel=0.05)] * 2


def test_the_advised_line_can_be_run(hidden):
    _, model = hidden
    model[0].mlp.weight.data.mul_(100)
    batch = torch.randn(2, 6, 32)
    found = wc.diagnose(model, batch)
    [finding] = [finding for finding in found.findings if finding.kind == "stream"]
    exec(finding.remedy, {"wc": wc, "model": model, "batch": batch})
    assert [finding.kind for finding in wc.diagnose(model, batch).findings] == ["not-seen"]


def test_a_kernel_of_a_hugging_face_model_and_the_way_out():
    def attend(module, query, key, value, attention_mask, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        return kernel(query, key, value).transpose(1, 2), None

    AttentionInterface.register("wellcond_tests", attend)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, vocab_size=50, **sizes))
    model.set_attn_implementation("wellcond_tests")
    batch = {"input_ids": torch.randint(50, (2, 7))}
    with pytest.raises(wc.WeightError, match="set_attn_implementation"):
        wc.init_(model, "calibrated", batch=batch)
    assert "not-seen" in [finding.kind for finding in wc.diagnose(model, batch).findings]
    model.set_attn_implementation("sdpa")
    wc.init_(model, "calibrated", batch=batch)
    assert wc.diagnose(model, batch).findings == ()


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

    def forward(self, x):
        return self.used(x)


def test_a_layer_that_the_batch_does_not_reach():
    model, batch = Half(), torch.randn(2, 5, 16)
    found = wc.diagnose(model, batch)
    assert not found.layers[1].called and [finding.kind for finding in found.findings] == ["not-seen"]
    assert found.layers[1].num_tokens is None and found.layers[1].scale_q > 0
    assert "not called" in str(found) and "not called" in found.to_html()
    with unchanged(model), pytest.raises(wc.WeightError, match=r"idle\.self_attn: not called on this batch.*sites="):
        wc.init_(model, "calibrated", batch=batch)
    with changes(model) as changed:
        wc.init_(model, "calibrated", batch=batch, sites=wc.find_attention(model)[:1])
    assert changed and not any("idle" in name for name in changed)
