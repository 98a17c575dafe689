"""Files, network, processes, command line and environment: nothing about models."""
