"""Small models and data for the real Trainer."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from wellcond.integrations.transformers import prepare

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def gpt2():
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))  # dropout, and a tied output layer


def bert():
    return BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=2, **SMALL))


def vit():
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=2, **SMALL))


MODELS = {"gpt2": gpt2, "bert": bert, "vit": vit}


def conditioned(name, condition="balanced", init="conditioned"):
    torch.manual_seed(0)
    return prepare(MODELS[name](), init=init, condition=condition)


def samples(name, count=16):
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        images = torch.randn(count, 3, 8, 8, generator=generator)
        return [{"pixel_values": image, "labels": i % 2} for i, image in enumerate(images)]
    tokens = torch.randint(32, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row if name == "gpt2" else i % 2} for i, row in enumerate(tokens)]


def make_trainer(model, name, folder, callbacks=None, data=None, **arguments):
    defaults = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    settings = TrainingArguments(str(folder), **(defaults | arguments))
    dataset = samples(name) if data is None else data
    return Trainer(model, settings, train_dataset=dataset, eval_dataset=samples(name, 4), callbacks=callbacks)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def inputs(name):
    return {key: torch.stack([s[key] for s in samples(name, 3)]) for key in samples(name, 1)[0] if key != "labels"}


@torch.no_grad()
def logits(model, name):
    return model.eval()(**inputs(name)).logits
