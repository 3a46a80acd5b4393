"""What the rules judge, and the line that initialises it: `wellcond.init.recommended`, for the layers concerned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wellcond.doctor.records import LayerFacts, NotFinite, TokenFacts
from wellcond.init import recommended


@dataclass(frozen=True)
class Case:
    """A model as far as it was examined."""

    layers: Sequence[LayerFacts]
    tokens: TokenFacts
    fresh: bool | None
    """Whether the model is untrained; None if that cannot be known."""
    whole: bool = True
    """Whether `layers` are all attention layers of the model."""
    lam: tuple[float, float] | None = None
    """Of the correction lam I, if the model has one: for Q and for K."""
    not_finite: NotFinite | None = None

    @property
    def has_tokens_to_scale(self) -> bool:
        """False only where it is known: patches, and no learned positions that are added to them."""
        return self.tokens.kind != "patches" or bool(self.tokens.positions)

    @property
    def evidence(self) -> tuple[str, str]:
        """What our records say about the recommended initialisation, and which record."""
        if self.has_tokens_to_scale:
            return recommended.EVIDENCE, recommended.RECORD
        return recommended.EVIDENCE_WITHOUT_TOKENS, recommended.TABLES

    def initialise(self, layers: Sequence[LayerFacts] = (), *, redraw: bool = False) -> str:
        """The recommended line.

        Args:
            layers: those concerned; empty for the model as a whole.
            redraw: also draw W_V and W_O of these layers, which `calibrated` only scales.
        """
        sites = self._only(layers or self.layers)
        if not self.has_tokens_to_scale:
            return _with(recommended.LINE_WITHOUT_TOKENS, sites)
        first = f'wc.init_(model, "default"{sites}); ' if redraw else ""
        return first + self.calibrate(layers)

    def calibrate(self, layers: Sequence[LayerFacts] = ()) -> str:
        """The line of `calibrated`, with what was not seen left out.

        Args:
            layers: only the towers that hold these layers, and not the tokens; empty for the model as a whole. A tower
                is set as a whole, since what a layer receives depends on the layers before it.
        """
        towers = {_tower(layer.name) for layer in layers}
        chosen = [layer for layer in self.layers if not layers or _tower(layer.name) in towers]
        reached = [layer for layer in chosen if layer.called]
        options = ", logits=None" if any(layer.logits_hidden for layer in reached) else ""
        if self._only(chosen):
            options += ", words=None, positions=None"
        return _with(recommended.LINE, options + self._only(reached))

    def _only(self, layers: Sequence[LayerFacts]) -> str:
        """The option that leaves the other attention layers of the model alone; empty if there are none."""
        if self.whole and len(layers) == len(self.layers):
            return ""
        return f", sites=[site for site in wc.find_attention(model) if site.name in {[layer.name for layer in layers]}]"


def _tower(name: str) -> str:
    """The list of blocks that holds a layer: its path up to the first number.

    Example:
        >>> _tower("visual.blocks.3.attn"), _tower("layers.0.blocks.1.attn"), _tower("self_attn")
        ('visual.blocks', 'layers', 'self_attn')
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]]) if numbers else name


def _with(line: str, options: str) -> str:
    """A call with further options."""
    return f"{line.removesuffix(')')}{options})"
