"""The parameter Jacobian of an attention head as an operator, and its spectrum with certified intervals."""
