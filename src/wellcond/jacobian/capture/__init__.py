"""From a model and a batch to what the Jacobian of every attention needs."""

from wellcond.errors import NotPlainError
from wellcond.jacobian.capture.attention import CapturedAttention, capture_attention, capture_sites

__all__ = ["CapturedAttention", "NotPlainError", "capture_attention", "capture_sites"]
