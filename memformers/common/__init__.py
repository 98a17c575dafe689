"""Files, network, processes, command line and environment: nothing of the subject."""
