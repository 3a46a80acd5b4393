"""Training and comparing."""
