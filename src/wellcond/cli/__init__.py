"""The `wellcond` command: one file per sub-command, each a thin door to the library."""

import wellcond.lab  # noqa: F401  (adds the models wellcond:NAME)
