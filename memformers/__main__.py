"""``python -m memformers`` is the ``memformers`` command."""

from memformers.cli import main

if __name__ == "__main__":
    main()
