"""The recall experiment: how much each memory recalls by distance, with equal numbers of keys, over seeds."""
