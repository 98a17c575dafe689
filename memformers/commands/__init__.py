"""The commands of ``memformers``: for each, a dataclass of its options that runs. ``memformers.cli`` says in
which file a command is."""
