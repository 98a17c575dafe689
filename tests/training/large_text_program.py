"""Run by torchrun: the command, to which any text is a large one, in a training whose processes give each
other up after a shorter time than the first one takes to prepare it.

Arguments: those seconds, then the command's.
"""

import sys
import time
from datetime import timedelta
from functools import partial

from torch import distributed as dist

from memformers.cli import main
from memformers.data import tokenize_corpus

if __name__ == "__main__":
    seconds, read = float(sys.argv[1]), tokenize_corpus.read

    def slowly(*arguments):
        time.sleep(1.5 * seconds)
        return read(*arguments)

    tokenize_corpus.BIG, tokenize_corpus.read = 1000, slowly
    dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=seconds))
    main(sys.argv[2:])
