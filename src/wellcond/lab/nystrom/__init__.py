"""The Jacobian of Nystrom attention in closed form."""
