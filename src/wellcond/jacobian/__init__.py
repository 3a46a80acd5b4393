"""The parameter Jacobian of one attention layer: exact, structured, and never wrong without saying so."""
