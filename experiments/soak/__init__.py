"""A training on two processes to which something happens every so many steps."""
