"""The commands of ``memformers``: one file each, with a dataclass of its options that runs."""
