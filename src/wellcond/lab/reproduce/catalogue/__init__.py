"""What is run for every table, figure and ablation."""
