"""labml's own dashboard, started for the user.

It needs the optional extra ``dashboard``; [`memformers.tracking`][], which sends runs to it, does not.
"""
