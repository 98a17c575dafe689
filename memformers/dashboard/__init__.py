"""labml's own dashboard, started for the user.

It needs the optional extra ``dashboard``. What brings runs to it is in
[`memformers.tracking`][], and needs nothing but Python.
"""
