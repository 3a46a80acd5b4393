"""What acts beside an optimiser while a model trains."""
