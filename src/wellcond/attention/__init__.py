"""Where Q, K, V and O are stored, in any transformer."""

import wellcond.attention.families  # noqa: F401  (registers the families)
