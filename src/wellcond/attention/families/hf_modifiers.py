"""Which modifiers a Hugging Face attention has, as far as its attributes, its layer or its config tell.

What only the adapter of a family knows (a position term on the queries) it adds itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from wellcond.attention.families import modifiers as words
from wellcond.attention.site import Place

GATES = ("gate_proj", "g_proj")
OUTPUT_NORMS = ("attn_sub_norm", "inner_attn_ln", "o_norm")
# They keep a value of attn_logit_softcapping that their forward does not use.
UNUSED_SOFTCAP = ("Gemma3Attention", "T5Gemma2SelfAttention")


def stated(place: Place) -> tuple[str, ...]:
    """The modifiers that can be read off the module, its layer or its config."""
    module: Any = place.module
    random_blocks = getattr(module, "num_random_blocks", 0) > 0
    return words.those(
        {
            words.ATTENTION_SINKS: getattr(module, "sinks", None) is not None,
            words.EXTRA_KEYS: _is_any(module, ("MvpAttention",)) and bool(place.config("use_prompt", False)),
            words.LOCAL_WINDOW: sees_window(place),
            words.SELECTED_KEYS: random_blocks or getattr(module, "indexer", None) is not None,
            words.LOGIT_SOFTCAP: soft_caps(place),
            words.CLIPPED_QKV: clips(place),
            words.SCALED_VALUES: getattr(module, "v_scale", 1.0) != 1.0,
            words.OUTPUT_NORM: _has_module(module, OUTPUT_NORMS),
            words.GATED_OUTPUT: _has_module(module, GATES),
        }
    )


def soft_caps(place: Place) -> bool:
    """Whether its logits are soft-capped."""
    cap = getattr(place.module, "attn_logit_softcapping", None)
    return cap is not None and not _is_any(place.module, UNUSED_SOFTCAP)


def clips(place: Place) -> bool:
    """Whether its projected queries, keys and values are clamped."""
    return bool(getattr(place.module, "clip_qkv", None) or place.config("clip_qkv"))


def sees_window(place: Place) -> bool:
    """Whether a mask or a division of the tokens keeps a query from some of the keys it could see without."""
    for base in type(place.module).__mro__:
        rule = WINDOWS.get(base.__name__)
        if rule is not None:
            return rule(place)
    # The usual way: the module knows its window, and whether its layer uses it.
    module: Any = place.module
    return bool(getattr(module, "sliding_window", None)) and bool(getattr(module, "is_sliding", True))


def _is_any(module: nn.Module, class_names: tuple[str, ...]) -> bool:
    return any(base.__name__ in class_names for base in type(module).__mro__)


def _has_module(module: nn.Module, names: tuple[str, ...]) -> bool:
    return any(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _always(place: Place) -> bool:
    return True


def _whole_model(place: Place) -> bool:
    """One mask for all layers, with a window if the config has one."""
    return bool(place.config("sliding_window"))


def _typed_layer(place: Place) -> bool:
    """The config lists the type of each layer."""
    types, index = place.config("layer_types"), _layer_index(place)
    return types is not None and index is not None and types[index] != "full_attention"


def _window_layer(place: Place) -> bool:
    """The layer divides its map into windows; size zero means that it does not."""
    return bool(getattr(place.parent, "window_size", 0))


def _listed_as_window(place: Place) -> bool:
    """All layers but those that the config lists see windows."""
    index = _layer_index(place)
    return index is not None and index not in place.config("fullatt_block_indexes", ())


def _swin(place: Place) -> bool:
    """Windows of the nominal map; they shrink to its shorter side, and a square map may be one window."""
    for layer in place.ancestors():
        resolution: Any = getattr(layer, "input_resolution", None)
        if resolution is not None:
            window: Any = layer.window_size
            return max(resolution) > min(*resolution, window)
    return False


def _lw_detr(place: Place) -> bool:
    layer: Any = place.parent
    return bool(getattr(layer, "window", False)) and layer.num_windows > 1


def _rf_detr(place: Place) -> bool:
    layer: Any = place.parent
    return not getattr(layer, "global_attention", True) and layer.num_windows > 1


def _seamless_v2(place: Place) -> bool:
    # The layers of the adapter after the encoder have the same attention and no chunks.
    return place.config("speech_encoder_chunk_size") is not None and "Adapter" not in type(place.parent).__name__


def _layer_index(place: Place) -> int | None:
    return next((int(part) for part in reversed(place.name.split(".")) if part.isdigit()), None)


def _by_class(rules: dict[str, Callable[[Place], bool]]) -> dict[str, Callable[[Place], bool]]:
    return {name: rule for names, rule in rules.items() for name in names.split()}


WINDOWS = _by_class(
    {
        # The layer or the module works on blocks, or is never given a mask without a window.
        """
        LongT5LocalAttention LongT5TransientGlobalAttention PegasusXGlobalLocalAttention
        BigBirdBlockSparseAttention BigBirdPegasusBlockSparseAttention Florence2VisionWindowAttention
        GraniteSpeechConformerAttention GraniteSpeechPlusConformerAttention GraniteSpeech5EncoderAttention
        EsmFold2AtomAttention MoonshineStreamingEncoderAttention NemotronAsrStreamingEncoderAttention
        Qwen2_5OmniAudioAttention Qwen3ASRAudioAttention Qwen3OmniMoeAudioAttention DiTAttention
        """: _always,
        """
        MistralAttention Ministral3Attention MixtralAttention MiniMaxAttention Phi3Attention Phi4MultimodalAttention
        PhimoeAttention Starcoder2Attention VoxtralRealtimeAttention VoxtralRealtimeTextAttention
        """: _whole_model,
        """
        Llama4TextAttention UnlimitedOcrTextAttention MuseGlimmerVisionAttention MuseSparkVisionAttention
        """: _typed_layer,
        """
        SamVisionAttention SamHQVisionAttention GotOcr2VisionAttention DeepseekOcr2SamVisionAttention
        PPFormulaNetVisionAttention SLANeXtVisionAttention UnlimitedOcrSamVisionAttention VitDetAttention
        Sam2MultiScaleAttention Sam3ViTRoPEAttention
        """: _window_layer,
        """
        Qwen2_5_VLVisionAttention Qwen2_5OmniVisionAttention Exaone4_5_VisionAttention
        """: _listed_as_window,
        """
        SwinAttention ClapAudioSelfAttention DonutSwinSelfAttention MaskFormerSwinSelfAttention Swinv2SelfAttention
        Swin2SRSelfAttention
        """: _swin,
        "LwDetrViTAttention": _lw_detr,
        "RfDetrDinov2Attention": _rf_detr,
        "SeamlessM4Tv2ConformerSelfAttention": _seamless_v2,
        "GPTNeoSelfAttention": lambda place: place.module.attention_type == "local",
        "HieraMaskUnitAttention": lambda place: bool(place.module.use_mask_unit_attn),
        "LocalSelfAttention": lambda place: place.module.chunk_length is not None,
        "Phi4MultimodalAudioAttention": lambda place: place.config("chunk_size", -1) > 0,
        # Space and time take turns: a token sees its frame, or its place in all frames.
        "TimesformerSelfAttention": lambda place: place.config("attention_type") == "divided_space_time",
        """
        MiniCPMOcrVisionAttention MiniCPMV4_6VisionAttention MiniCPMV4_7VisionAttention
        """: lambda place: "WindowAttention" in type(place.parent).__name__,
    }
)
