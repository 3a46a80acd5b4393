"""Small models of several libraries, with an input of each, ready to train and to export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import wellcond as wc


@dataclass(frozen=True)
class Case:
    """How to build a model, and a batch that it takes as keyword arguments."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]


def images(size: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda count: {"x": torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))}


def ids(count: int) -> dict[str, Tensor]:
    drawn = torch.randint(0, 50, (count, 12), generator=torch.Generator().manual_seed(count))
    return {"input_ids": drawn, "attention_mask": (torch.arange(12) < 9).long().expand(count, -1).contiguous()}


def tokens(count: int) -> dict[str, Tensor]:
    return {"src": torch.randn(count, 7, 24, generator=torch.Generator().manual_seed(count))}


def timm_model(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=5, **arguments)

    return build


def build_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    return BertModel(BertConfig(**sizes, vocab_size=50, max_position_embeddings=16))


def build_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3, use_cache=False))


def build_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 3, 32, batch_first=True), 2, enable_nested_tensor=False)


CASES = {
    "timm_vit": Case(
        timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3), images(32)
    ),
    "timm_swin": Case(
        timm_model(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(2,), num_heads=(3,)
        ),
        images(32),
    ),
    "timm_xcit": Case(
        timm_model("xcit_nano_12_p16_224", img_size=32, embed_dim=24, depth=2, num_heads=3, cls_attn_layers=1),
        images(32),
    ),
    "hf_bert": Case(build_bert, ids),
    "hf_gpt2": Case(build_gpt2, ids),
    "torch_encoder": Case(build_encoder, tokens),
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "identity": ("identity", {"lam": 0.5}),
    "polar": ("polar", {}),
    "balanced": ("balanced", {}),
    "balanced_frozen": ("balanced", {"frozen": True}),
}


def first_tensor(output: Any) -> Tensor:
    """The output itself, or the first of several."""
    return output if isinstance(output, Tensor) else output[0]


def built(case: Case) -> nn.Module:
    """A plain model; the same weights at every call."""
    torch.manual_seed(1)
    return case.build().eval()


def trained(case: Case, method: str) -> nn.Module:
    """A conditioned model after one step of training."""
    name, options = METHODS[method]
    model = wc.condition_(built(case), name, **options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_tensor(model(**case.batch(2))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model.eval()


def outputs(model: nn.Module, case: Case, count: int = 2) -> Tensor:
    with torch.no_grad():
        return first_tensor(model(**case.batch(count)))


def never_conditioned(model: nn.Module, case: Case) -> nn.Module:
    """A plain model with the effective weights of a conditioned one."""
    plain = built(case)
    with wc.folded(model):
        plain.load_state_dict(model.state_dict())
    return plain
