"""What is in the folder of a run: its files, reading them back, loading its model, exporting its metrics."""
