"""What a comparison ran, in a few words made from its records: never the set-up that it stands for."""

from __future__ import annotations

from typing import Any

from wellcond.lab.report.load_runs import Comparison

FAMILIES = {
    "timm:vit": "ViT", "timm:deit": "DeiT", "timm:swin": "Swin", "timm:xcit": "XCiT", "timm:davit": "DaViT",
    "hf:gpt2": "GPT-2", "wellcond:crammed_bert": "Crammed BERT", "wellcond:long_range": "Nystromformer",
    "wellcond:mask_rcnn": "Mask R-CNN",
}  # fmt: skip
DATA = {
    "uoft-cs/cifar10": "CIFAR-10", "roneneldan/TinyStories": "TinyStories", "stanfordnlp/imdb": "IMDB",
    "Salesforce/wikitext (wikitext-2-v1)": "WikiText-2", "listops": "ListOps", "pathfinder": "Pathfinder",
    "acl-citation-pairs": "pairs of papers", "coco2017-mini": "COCO 2017",
}  # fmt: skip
EXAMPLES = {"image_classification": "images", "detection": "images", "language_modelling": "texts",
            "masked_language_modelling": "texts"}  # fmt: skip
WIDTHS = ("embed_dim", "n_embd", "width", "embed_dims")
NORMS = {"without_block_norms": "without block norms", "without_attention_norm": "without the attention's norm"}


def what_ran(comparison: Comparison) -> str:
    """Model, its size, data and their size.

    Example:
        >>> from pathlib import Path
        >>> from wellcond.lab.report.records import Run
        >>> record = {"method": "default", "seed": 0, "data": {"name": "uoft-cs/cifar10", "train": 5000}, "config": {
        ...     "model": {"name": "timm:vit_tiny_patch16_224", "arguments": {"embed_dim": 64}},
        ...     "task": {"name": "image_classification"}}}
        >>> runs = (Run(Path("."), record),)
        >>> what_ran(Comparison(Path("."), "", "", "", "", "default", ("default",), runs))
        'ViT, width 64, CIFAR-10, 5,000 images'
    """
    record = comparison.runs[0].record
    config, data = record.get("config") or {}, record.get("data") or {}
    model, task = config.get("model") or {}, config.get("task") or {}
    arguments = model.get("arguments") or {}
    name = str(model.get("name") or "")
    family = next((said for start, said in FAMILIES.items() if name.startswith(start)), name.rpartition(":")[2])
    if "backbone" in arguments:
        family += f" on {FAMILIES.get('timm:' + str(arguments['backbone']).split('_')[0], arguments['backbone'])}"
        arguments = arguments.get("backbone_arguments") or {}
    parts = [family, _width(arguments, record)]
    parts += [NORMS.get(str(model.get("norms")), ""), "QK-norm" if arguments.get("qk_norm") else ""]
    size = ((data.get("fingerprint") or {}).get("train") or {}).get("size") or data.get("train")
    noun = EXAMPLES.get(str(task.get("name")), "sequences")
    length = f" of {task['length']}" if noun == "sequences" and task.get("length") else ""
    parts += [DATA.get(str(data.get("name")), str(data.get("name"))), f"{size:,} {noun}{length}" if size else ""]
    return ", ".join(part for part in parts if part)


def _width(arguments: dict[str, Any], record: dict[str, Any]) -> str:
    width = next((arguments[key] for key in WIDTHS if key in arguments), None)
    if width is not None:
        return f"width {' and '.join(map(str, width)) if isinstance(width, list) else width}"
    parameters = (record.get("model") or {}).get("parameters")
    return f"{parameters / 1e6:.2f} M parameters" if parameters else ""
