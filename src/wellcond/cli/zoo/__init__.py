"""Which attention of a library is described, and which form of the Jacobian measures it."""
