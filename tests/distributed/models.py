"""Small models, their data, and the ways to spread them over two processes."""

import timm
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from wellcond.attention.sharding import unwrap

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3])
TOKENS = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    """torch.nn's own attention, whose fused weight belongs to the attention module itself."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
        self.head = nn.Linear(12, 4)

    def forward(self, images):
        x = images.flatten(1).reshape(len(images), 64, 12)[:, :5]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def vit():
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))


def gpt2(**sizes):
    sizes = {"vocab_size": 32, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16} | sizes
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


MODELS = {"vit": vit, "llama": llama, "gpt2": gpt2, "torch": Encoder}


def build(name):
    torch.manual_seed(0)
    return MODELS[name]()


def blocks_of(model):
    if hasattr(model, "blocks"):
        return model.blocks
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def fsdp(model, mesh=None):
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_of_attention(model):
    """Each attention is a unit of its own: FSDP2 changes the class of that very module."""
    for block in blocks_of(model):
        fully_shard(block.self_attn if hasattr(block, "self_attn") else block.attn)
    return fsdp(model)


def tensor_parallel(model, mesh=None):
    mesh = init_device_mesh("cpu", (2,)) if mesh is None else mesh
    columns = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    for block in blocks_of(model):
        parallelize_module(block.self_attn, mesh, columns | {"o_proj": RowwiseParallel()})
    return model


def fsdp_over_tensor_parallel(model):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    return fsdp(tensor_parallel(model, mesh["tensor"]), mesh["data"])


def compiled_ddp(model):
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")


def compiled_blocks(wrap):
    def wrapped(model):
        model = wrap(model)
        for block in blocks_of(model):
            block.compile(backend="aot_eager")
        return model

    return wrapped


def tensor_parallel_elsewhere(model):
    """Only the MLP is cut; each process has the attention for itself."""
    mesh = init_device_mesh("cpu", (2,))
    for block in blocks_of(model):
        parallelize_module(block.mlp, mesh, {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})
    return model


def fsdp_of_all_at_once(model):
    """One unit, whose weights stay whole after an evaluation."""
    return fully_shard(model)


def fsdp_in_bfloat16(model):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in blocks_of(model):
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


WRAPPERS = {
    "alone": lambda model: model,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp": fsdp,
    "fsdp of attention": fsdp_of_attention,
    "tp": tensor_parallel,
    "fsdp over tp": fsdp_over_tensor_parallel,
    "compiled ddp": compiled_ddp,
    "compiled fsdp": compiled_blocks(fsdp),
    "compiled tp": compiled_blocks(tensor_parallel),
    "compiled fsdp over tp": compiled_blocks(fsdp_over_tensor_parallel),
    "tp elsewhere": tensor_parallel_elsewhere,
    "fsdp at once": fsdp_of_all_at_once,
    "fsdp in bfloat16": fsdp_in_bfloat16,
}


def is_language_model(model):
    return hasattr(unwrap(model), "config")


def loss_of(model, part=slice(None)):
    if is_language_model(model):
        return model(input_ids=TOKENS[part], labels=TOKENS[part]).loss
    return nn.functional.cross_entropy(model(IMAGES[part]), LABELS[part])


def probe_of(model):
    return {"input_ids": TOKENS[:1]} if is_language_model(model) else IMAGES[:1]


def gather(model):
    """Whole weights under plain names, as torch's distributed checkpoint gathers them."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value.clone() for name, value in state.items()}
