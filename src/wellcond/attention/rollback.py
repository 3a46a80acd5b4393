"""Moved to `wellcond.attention.checks`; /work/golden/rename_sharding.py rewrites the imports and deletes this file."""

from wellcond.attention.checks import Rollback as Rollback
