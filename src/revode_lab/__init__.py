"""The laboratory around revode: data, training, stability, the paper's tables, and the ``revode`` command.

It uses public names of `revode` only, and needs ``pip install "revode[lab]"``. The library never imports it.
"""
