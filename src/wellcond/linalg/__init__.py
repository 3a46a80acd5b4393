"""Formulas on tensors; nothing here knows an nn.Module."""
