"""What is wrong with a model's attention, and the line that fixes it: `wellcond.diagnose`."""
