"""Models that no library has in the form an experiment needs, as `wellcond:NAME`; importing this registers them."""

from wellcond.experiments.architectures import crammed_bert, long_range

__all__ = ["crammed_bert", "long_range"]
