"""The files of a run, folders that are written atomically, and reading of finished runs."""
