"""The commands, one module each: ``add_arguments(parser)`` and ``run(args) -> int``.

A command module imports nothing heavy at its top, so that every ``--help`` answers at once; ``run`` imports the room it
serves, calls it and prints. Bad input is raised as ``ValueError`` by the room and printed as one sentence by ``cli``.
"""
