"""Recipes that ship with wellcond, one folder for each scale."""
