"""Tune, then test: every method searches its own values of some fields before methods are compared."""
