"""Training: from a recipe, a method and a seed to a finished run."""
