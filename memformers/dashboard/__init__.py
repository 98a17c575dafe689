"""labml's own dashboard, started for the user.

It needs the optional extra ``dashboard``. Runs are sent to it by [`memformers.tracking`][], which needs only
Python.
"""
