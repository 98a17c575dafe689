"""Memories that are no part of the package, each in one file: they show that OwnMemory is enough for them."""
