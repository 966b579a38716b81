"""The commands, one module each: ``add_arguments(parser)`` and ``run(args) -> int``.

A command module imports nothing heavy at its top, so that every ``--help`` answers at once; ``run`` imports the package it
serves. ``cli`` prints a ``ValueError`` of bad input as one sentence.
"""
