"""The engine: branches run by a reversible scheme, and gradients without stored activations."""

from __future__ import annotations

from revode.engine.arrival import DriftWarning as DriftWarning
from revode.engine.arrival import ReversalError as ReversalError
from revode.engine.arrival import check as check
from revode.engine.branch import BranchError as BranchError
from revode.engine.examination import BranchReport as BranchReport
from revode.engine.examination import check_branch as check_branch
from revode.engine.grid import DEFAULT_BITS as DEFAULT_BITS
from revode.engine.grid import OutOfRange as OutOfRange
from revode.engine.replay import keep as keep
from revode.engine.sequence import ReversibleSequence as ReversibleSequence
from revode.engine.sequence import states_kept as states_kept
from revode.engine.strategy import STRATEGIES as STRATEGIES
from revode.engine.strategy import Strategy as Strategy
from revode.engine.walk import Walk as Walk
