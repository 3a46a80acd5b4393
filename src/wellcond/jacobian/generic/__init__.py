"""The Jacobian of any attention, by automatic differentiation of its own module."""
