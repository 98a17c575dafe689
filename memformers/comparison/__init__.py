"""Experiments: arms × seeds × a task, the training runs of all of them, and what is measured afterwards."""
