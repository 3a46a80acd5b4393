"""Weights at step 0."""
