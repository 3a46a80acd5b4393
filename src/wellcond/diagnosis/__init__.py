"""What is wrong with a model's attention, and the line that mends it: `wellcond.diagnose`."""
