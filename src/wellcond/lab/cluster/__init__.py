"""Comparisons on the machines of a Ray cluster."""
