"""Measuring: condition numbers of weights and Jacobians, once or along a run."""
