"""Corrections that act on every forward pass."""
