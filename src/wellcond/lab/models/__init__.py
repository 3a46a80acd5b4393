"""Models that no library has in the form an experiment needs, as `wellcond:NAME`; importing this registers them."""

from wellcond.lab.models import crammed_bert, long_range, mask_rcnn

__all__ = ["crammed_bert", "long_range", "mask_rcnn"]
