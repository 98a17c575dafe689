"""Recipes at equal time: what a training can reach in two minutes."""
