"""The engine's view of ``torch.compile``.

Nothing here imports dynamo: it takes as long to import as torch itself, and most runs never compile.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn


def compilation_is_possible() -> bool:
    """Return True if anything may be compiled in this process."""
    return "torch._dynamo" in sys.modules


@functools.cache
def eagerly(function: Any) -> Any:
    """Return `function` with frames that dynamo leaves alone (separately compiled code in it still runs compiled)."""
    return torch.compiler.disable(function, reason="a reversible walk runs eagerly")


# Dynamo calls it for real while it traces. It is what torch.compiler.assume_constant_result does, without importing dynamo.
eagerly._dynamo_marked_constant = True  # type: ignore[attr-defined]


def holds_compiled(branch: nn.Module) -> bool:
    """Return True if `branch`, or a part of it, was compiled on its own."""
    from torch._dynamo import OptimizedModule

    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in branch.modules()
    )
