"""``python -m memformers.comparison.recall FOLDER`` trains the run that is described in FOLDER."""

from memformers.comparison.recall.task import RECALL
from memformers.comparison.task import train_alone

if __name__ == "__main__":
    train_alone(RECALL)
