"""U-Nets that nnU-Net builds from its plans files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from revode.networks.classifier import build
from revode.networks.cost import step_bytes
from revode.networks.unet import UNet, UNetConfig
from revode.operators import NORMS, make_norm

BYTES_PER_ELEMENT = 5
"""Bytes at the peak of a step of nnU-Net's own network for each element that it counts: 5.4 and 5.9, rounded down."""

_CONVOLUTIONS: dict[Any, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_NONLINEARITIES = {"relu": nn.ReLU(), "leaky_relu": nn.LeakyReLU(), "gelu": nn.GELU(), "silu": nn.SiLU()}


class PlannedUNet(UNet):
    """A reversible U-Net with the arguments of nnU-Net's ``ResidualEncoderUNet``, which it can stand in for.

    A residual block of the plan is a reversible block; blocks on the way up are the plan's ``n_conv_per_stage_decoder``.

    >>> net = PlannedUNet(
    ...     1, 3, [16, 32, 64], nn.Conv3d, [[1, 3, 3], 3, 3], [1, [1, 2, 2], 2], [1, 2, 2], 4, [1, 1],
    ...     norm_op=nn.InstanceNorm3d, norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU, deep_supervision=True,
    ... )
    >>> [tuple(scores.shape) for scores in net(torch.randn(1, 1, 8, 16, 16))]
    [(1, 4, 8, 16, 16), (1, 4, 8, 8, 8)]

    The arguments are those of ``ResidualEncoderUNet``; docs/howto/nnunet.md lists the values of each. ``conv_bias`` makes no
    difference, since the norm behind each convolution has a bias. Coarse heads are there in any case, as in nnU-Net.
    `options` are further options of `UNetConfig`, such as ``scheme`` or ``exact``.
    """

    def __init__(
        self,
        input_channels: int,
        n_stages: int,
        features_per_stage: int | Sequence[int],
        conv_op: type[nn.Module],
        kernel_sizes: Any,
        strides: Any,
        n_blocks_per_stage: int | Sequence[int],
        num_classes: int,
        n_conv_per_stage_decoder: int | Sequence[int],
        conv_bias: bool = False,
        norm_op: type[nn.Module] | None = None,
        norm_op_kwargs: dict[str, Any] | None = None,
        dropout_op: type[nn.Module] | None = None,
        dropout_op_kwargs: dict[str, Any] | None = None,
        nonlin: type[nn.Module] | None = None,
        nonlin_kwargs: dict[str, Any] | None = None,
        deep_supervision: bool = False,
        **options: Any,
    ) -> None:
        if conv_op not in _CONVOLUTIONS:
            raise ValueError(f"conv_op must be nn.Conv1d, nn.Conv2d or nn.Conv3d, got {conv_op!r}")
        ndim = _CONVOLUTIONS[conv_op]
        first, *between = strides if isinstance(strides, list | tuple) else [strides] * n_stages
        if math.prod(first if isinstance(first, list | tuple) else [first]) != 1:
            raise ValueError(f"the first of the strides must be 1, got {first!r}: use stem_stride for a strided stem")
        if dropout_op not in (None, nn.Dropout):
            raise ValueError(f"dropout_op must be None or nn.Dropout, got {dropout_op!r}")
        planned = {
            "scheme": "additive",  # with the norms of plans it learns faster than the others
            "in_channels": input_channels,
            "num_classes": num_classes,
            "up_blocks": _for_each(n_conv_per_stage_decoder, n_stages - 1),
            "kernels": kernel_sizes,
            "strides": between,
            "norm": _name_of(norm_op, norm_op_kwargs, {name: make_norm(name, 8, ndim) for name in NORMS}, "none", 8),
            "activation": _name_of(nonlin, nonlin_kwargs, _NONLINEARITIES, "identity"),
            "dropout": 0.0 if dropout_op is None else dropout_op(**(dropout_op_kwargs or {})).p,
            "deep_supervision": True,
        }
        channels, num_blocks = _for_each(features_per_stage, n_stages), _for_each(n_blocks_per_stage, n_stages)
        plain = UNetConfig(name="planned-unet", ndim=ndim, channels=channels, blocks=num_blocks)
        made = build(plain.with_options(**planned | options))
        super().__init__(made.config, made.stem, list(made.stages), made.head)  # type: ignore[arg-type]
        self.deep_supervision = deep_supervision

    def _of_parts(self, *parts: Any) -> UNet:
        return UNet(*parts)

    @property
    def decoder(self) -> PlannedUNet:
        """Return this network: nnU-Net's trainer switches its ``deep_supervision``."""
        return self

    def compute_conv_feature_map_size(self, input_size: Sequence[int]) -> int:
        """Return the memory of one image in the unit of nnU-Net's planner: elements that its own network would count.

        The bytes are those of `step_bytes` under autocast, with deep supervision: all tensors at the peak of a step, beside
        weights and gradients. Two blocks in a unit stand for any number.

        Args:
            input_size: the edges of the patch.
        """
        config = self.config
        if len(input_size) != config.ndim:
            raise ValueError(f"input_size is {config.ndim} edges, without batch and channels, got {tuple(input_size)}")
        levels, few = len(config.channels), [min(2, n) for n in config.stage_blocks]
        shallow = config.with_options(blocks=tuple(few[:levels]), up_blocks=tuple(few[levels:]) or None)
        with FakeTensorMode():
            _, peak = step_bytes(build(shallow), torch.zeros(1, config.in_channels, *input_size))
        return peak // BYTES_PER_ELEMENT


def _for_each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)


def _name_of(
    kind: type[nn.Module] | None, kwargs: dict[str, Any] | None, ours: dict[str, nn.Module], absent: str, *args: Any
) -> str:
    """Return the name among `ours` of the module that equals this one, ``inplace`` or not."""
    if kind is None:
        return absent
    given = {name: value for name, value in (kwargs or {}).items() if name != "inplace"}
    asked = f"{kind.__name__} with {given}"
    with contextlib.suppress(TypeError):
        asked = repr(kind(*args, **given))
    for name, module in ours.items():
        if repr(module) == asked:
            return name
    raise ValueError(f"a plan may have {' or '.join(repr(module) for module in ours.values())}, got {asked}")
