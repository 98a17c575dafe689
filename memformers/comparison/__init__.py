"""Experiments: arms × seeds × a task, the trainings of all of them, and what is measured afterwards."""
