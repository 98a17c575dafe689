"""The commands of ``memformers``: a file for each, with a dataclass of its options that runs; ``options`` and
``trained`` have those that several share."""
