"""Memories that are no part of the package, each in one file: CustomMemory is enough for them."""
