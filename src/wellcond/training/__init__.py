"""What runs beside an optimiser: a monitor of every head, alarms, and what acts on the weights."""
