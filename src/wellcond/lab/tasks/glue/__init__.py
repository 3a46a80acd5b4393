"""GLUE: fine-tuning of a pre-trained masked language model, scored by the metrics of the benchmark."""
