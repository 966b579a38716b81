"""The engine: branches run by a reversible scheme, and gradients without stored activations."""

from __future__ import annotations

from revode.engine.sequence import STRATEGIES as STRATEGIES
from revode.engine.sequence import ReversibleSequence as ReversibleSequence
from revode.engine.sequence import states_kept as states_kept
