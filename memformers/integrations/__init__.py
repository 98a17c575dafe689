"""Adapters to other people's programs, a file for each; a file needs its program, an extra of the package."""
