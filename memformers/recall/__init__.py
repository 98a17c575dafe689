"""The recall experiment: what each memory recalls, by distance, at equal keys and over seeds."""
