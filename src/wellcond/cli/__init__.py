"""The `wellcond` command: one file per sub-command, each a thin door to the library."""
