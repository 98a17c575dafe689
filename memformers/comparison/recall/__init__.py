"""The recall experiment: memories with equal numbers of keys in one network, on a stream that sets values and
asks for them."""
