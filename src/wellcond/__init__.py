"""Well-conditioned attention for PyTorch: find it, initialise it, condition it, fold it."""

from wellcond.attention.find import find_attention
from wellcond.attention.registry import register_adapter

__all__ = ["find_attention", "register_adapter"]
