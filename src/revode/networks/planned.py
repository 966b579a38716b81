"""U-Nets that nnU-Net builds from its plans files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from revode.memory import SavedTensors
from revode.networks.classifier import build
from revode.networks.unet import UNet, UNetConfig
from revode.operators import NORMS, make_norm

BYTES_PER_ELEMENT = 4
"""What nnU-Net's own networks keep under autocast for each element that they count; `test_planned.py` measures 4.5."""

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

    Args:
        input_channels: channels of the image.
        n_stages: resolutions.
        features_per_stage: channels at each resolution.
        conv_op: ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``.
        kernel_sizes: for each resolution.
        strides: for each resolution; the first is 1.
        n_blocks_per_stage: blocks on the way down, for each resolution.
        num_classes: scores at a point.
        n_conv_per_stage_decoder: blocks on the way up, the coarsest first.
        conv_bias: makes no difference, since the norm behind each convolution has a bias.
        norm_op: ``nn.InstanceNorm3d``, ``nn.BatchNorm3d`` and their like, or None for biases.
        norm_op_kwargs: as of the norm of that name in this library.
        dropout_op: None or ``nn.Dropout``.
        dropout_op_kwargs: its ``p``.
        nonlin: ``nn.LeakyReLU``, ``nn.ReLU``, ``nn.GELU`` or ``nn.SiLU``, with torch's defaults.
        nonlin_kwargs: ``inplace`` makes no difference.
        deep_supervision: whether scores come as a list; the coarse heads are there in any case, as in nnU-Net.
        options: further options of `UNetConfig`, such as ``scheme`` or ``exact``.
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
            "scheme": "revnet",  # with the norms of plans it learns faster than the others
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
        """This network: where nnU-Net's trainer switches ``deep_supervision``."""
        return self

    def compute_conv_feature_map_size(self, input_size: Sequence[int]) -> int:
        """Return the memory of one image in a training step, in the unit of nnU-Net's planner: elements that it would store.

        The bytes are those of the pairs that backward keeps, of the largest graph of a branch, and of the largest pair twice:
        as it is rebuilt, and its gradient.

        Args:
            input_size: the edges of the patch.
        """
        config = self.config
        if len(input_size) != config.ndim:
            raise ValueError(f"input_size is {config.ndim} edges, without batch and channels, got {tuple(input_size)}")
        kept, largest, level_strides = 0, 0, [(1,) * config.ndim, *config.level_strides]
        for unit, (_, sequence, _) in enumerate(self.sequences()):
            edges = [-(-edge // factor) for edge, factor in zip(input_size, config.reductions, strict=True)]
            for strides in level_strides[config.level(unit) + 1 :]:
                edges = [edge * stride for edge, stride in zip(edges, strides, strict=True)]
            points, channels = math.prod(edges), config.stage_channels[unit]
            kept += 4 * channels * (1 if config.splits else 2) * points
            largest = max(
                largest, points * self._graph_bytes(sequence.fields[-1], channels // (2 if config.splits else 1))
            )
        return round((kept + largest) / BYTES_PER_ELEMENT)

    def _graph_bytes(self, field: nn.Module, channels: int) -> float:
        """Bytes that autograd keeps of a branch for each point of an image."""
        parameter, edges, found = next(field.parameters()), [8] * self.config.ndim, []
        for batch in (1, 2):  # what does not grow with the batch is of the kernels
            x = torch.zeros(batch, channels, *edges, dtype=parameter.dtype, device=parameter.device, requires_grad=True)
            with SavedTensors(field.parameters()) as saved:
                field(x)
            found.append(saved.num_bytes)
        return (found[1] - found[0]) / math.prod(edges)


def _for_each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)


def _name_of(
    kind: type[nn.Module] | None, kwargs: dict[str, Any] | None, ours: dict[str, nn.Module], absent: str, *args: Any
) -> str:
    """The name among `ours` of the module that is the same as this one, ``inplace`` or not."""
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
