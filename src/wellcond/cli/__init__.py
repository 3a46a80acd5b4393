"""The `wellcond` command: a file for each sub-command, or for a few that belong together."""

import wellcond.lab  # noqa: F401  (adds the models wellcond:NAME)
