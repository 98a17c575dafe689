"""Whether longer memories and more slots predict a text better."""
