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
from memformers.data import preparing

if __name__ == "__main__":
    seconds, gather = float(sys.argv[1]), preparing.gather

    def slowly(*arguments):
        time.sleep(1.5 * seconds)
        return gather(*arguments)

    preparing.BIG, preparing.gather = 1000, slowly
    dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=seconds))
    main(sys.argv[2:])
