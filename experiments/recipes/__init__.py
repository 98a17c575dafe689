"""Recipes at equal time: the loss that a training reaches in two minutes."""
