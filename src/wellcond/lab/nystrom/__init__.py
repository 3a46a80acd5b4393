"""Nystrom attention: importing this registers the structured operator of its heads with `wellcond.jacobian.select`."""

from wellcond.lab.nystrom.operator import NystromJacobian

__all__ = ["NystromJacobian"]
