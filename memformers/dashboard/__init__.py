"""The live page, and labml's own dashboard on files; both need the optional extra ``dashboard``."""
