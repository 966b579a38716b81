"""What docs/speed.md tells of the convolutions under a reversible step: their times alone, and what was tried on them.

python benchmarks/kernels.py > kernels.md     (about a minute on an idle machine)
"""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from measure import interleave
from page import markdown
from torch import Tensor

from revode import SymmetricField

SHAPES = ((64, 16, 32), (64, 32, 16), (64, 56, 8), (32, 16, 32), (32, 32, 16), (32, 64, 8))
"""(batch, channels of a half, edge): the stages of hamiltonian-74 in the benchmark, and of hamiltonian-1202."""
REPEATS, CHUNK = 30, 16


def images(batch: int, channels: int, edge: int) -> Tensor:
    return torch.randn(batch, channels, edge, edge).contiguous(memory_format=torch.channels_last)


def weight_gradient(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    ones = [1, 1]
    arguments = (g, x, weight, None, ones, ones, ones, False, [0, 0], 1, [False, True, False])
    return torch.ops.aten.convolution_backward(*arguments)[1]


def merged_vjp(field: SymmetricField, q: Tensor, g: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The product of a leading symmetric field with state and co-state in one batch: 3 calls in place of 6.

    K acts on [q; g] and K' on [h; s], h being the hidden layer and s its co-state; the weight gradient pairs q with s and g
    with h, so a third slot repeats q. It costs three more passes over a state than the two calls one by one.
    """
    weight, lead, bias = field.tensors()
    per_channel, batch = (1, -1, 1, 1), len(q)
    slots = torch.empty_strided((3 * batch, *q.shape[1:]), q.stride())
    torch.add(q, lead.view(per_channel), out=slots[:batch])
    slots[batch : 2 * batch].copy_(g)
    slots[2 * batch :].copy_(slots[:batch])
    both = F.conv2d(slots[: 2 * batch], weight, padding=1)
    hidden, s = both[:batch], both[batch:]
    hidden.add_(bias.view(per_channel)).relu_()
    torch.ops.aten.threshold_backward.grad_input(s, hidden, 0, grad_input=s)
    u, gq = F.conv_transpose2d(both, weight, padding=1).split(batch)
    g_weight = weight_gradient(slots[batch:], both, weight)
    return u, gq, [g_weight, gq.sum((0, 2, 3)), s.sum((0, 2, 3))]


def check(field: SymmetricField, q: Tensor, g: Tensor) -> None:
    """Both ways must give one product."""
    one, other = field.vjp(q, g.clone(), q.dtype, True), merged_vjp(field, q, g)
    for a, b in zip([*one[:2], *one[2]], [*other[:2], *other[2]], strict=True):
        assert (a - b).norm() < 1e-4 * a.norm()


@torch.no_grad()
def row(batch: int, channels: int, edge: int) -> list[str]:
    field = SymmetricField(channels, leading=True).to(memory_format=torch.channels_last)
    weight = field.operator.weight
    x, g = (images(batch, channels, edge) for _ in range(2))
    xx, gg = (images(2 * batch, channels, edge) for _ in range(2))
    check(field, x, g)

    def in_chunks() -> None:
        for a, b in zip(x.split(CHUNK), g.split(CHUNK), strict=True):
            weight_gradient(a, b, weight)

    # What a convolution of such a tensor returns is in the blocked layout that its kernels want.
    plain = weight.detach().contiguous()
    blocked, blocked_g = (F.conv2d(t.contiguous().to_mkldnn(), plain, padding=1) for t in (x, g))
    norm = torch.nn.BatchNorm2d(channels)
    _, mean, variance = torch.native_batch_norm(x, norm.weight, norm.bias, None, None, True, 0.0, norm.eps)

    def normalize(given: bool) -> Tensor:
        statistics = (mean, variance) if given else (None, None)
        return torch.native_batch_norm(x, norm.weight, norm.bias, *statistics, not given, 0.0, norm.eps)[0]

    actions = {
        "conv": lambda: F.conv2d(x, weight, padding=1),
        "weight": lambda: weight_gradient(x, g, weight),
        "conv doubled": lambda: F.conv2d(xx, weight, padding=1),
        "weight doubled": lambda: weight_gradient(xx, gg, weight),
        "weight in chunks": in_chunks,
        "conv blocked": lambda: F.conv2d(blocked, plain, padding=1),
        "weight blocked": lambda: weight_gradient(blocked, blocked_g, plain),
        "norm": lambda: normalize(given=False),
        "norm given": lambda: normalize(given=True),
        "vjp": lambda: field.vjp(x, g.clone(), x.dtype, True),
        "merged": lambda: merged_vjp(field, x, g),
    }
    for action in actions.values():
        action()
    ms = {name: 1e3 * statistics.median(times) for name, times in interleave(actions, REPEATS).items()}
    conv, grad = ms["conv"], ms["weight"]
    ratios = [(6 * conv + 2 * grad) / (4 * conv + 2 * grad), ms["conv doubled"] / (2 * conv)]
    ratios += [ms["weight doubled"] / (2 * grad), ms["weight in chunks"] / grad]
    ratios += [ms["conv blocked"] / conv, ms["weight blocked"] / grad]
    numbers = [f"{number:.2f}" for number in (conv, grad, *ratios)]
    norms, merged = f"{ms['norm']:.2f}, {ms['norm given']:.2f}", f"{ms['merged'] / ms['vjp']:.2f}"
    return [f"{batch} x {channels} x {edge}²", *numbers, norms, merged]


def main() -> None:
    torch.manual_seed(0)
    header = ("half of a state", "K, ms", "∂K, ms", "floor", "K doubled", "∂K doubled", "∂K in chunks")
    header += ("K blocked", "∂K blocked", "batch norm, ms: found, given", "merged vjp")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print(markdown(header, [row(*shape) for shape in SHAPES]))


if __name__ == "__main__":
    main()
