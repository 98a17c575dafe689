"""What ``memformers`` can do: a file a command, each a dataclass of its options that runs."""
