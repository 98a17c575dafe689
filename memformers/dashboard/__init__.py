"""labml's own dashboard, started for the user, and what brings runs to it.

What runs in trainings (``discovery``, ``runs``, ``feeding``) needs nothing but Python; what runs in
the dashboard itself needs the optional extra, ``memformers[dashboard]``.
"""
