"""`revode.odeint`: solutions and gradients of known equations, of autograd and of torchdiffeq; or one clear sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from revode import BranchError, MidPoint, ReversalError, Walk, odeint
from revode.memory import SavedTensors

FIXED = {"euler": 1, "midpoint": 2, "heun2": 2, "rk4": 4}
ADAPTIVE = {"bosh3": 3, "dopri5": 5}
EVALUATIONS = {"euler": 2, "midpoint": 4, "heun2": 4, "rk4": 8, "bosh3": 7, "dopri5": 13}
"""Of func in a step."""
TURN = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)


def times(*values: float, requires_grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


class Net(nn.Module):
    """A small network that sees the time."""

    def __init__(self, features: int = 3, dropout: float = 0.0, norm: bool = False, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(features + 1, width), nn.Linear(width, features)
        self.norm, self.dropout = nn.BatchNorm1d(width) if norm else nn.Identity(), nn.Dropout(dropout)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.first(torch.cat([y, t.expand(*y.shape[:-1], 1)], -1)))
        return self.last(self.dropout(torch.tanh(hidden)))


class Rate(nn.Module):
    """y' = a y + b cos t."""

    def __init__(self, a: float, b: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(times(a)), nn.Parameter(times(b))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.a * y + self.b * torch.cos(t)


def gradients(
    func: nn.Module, y0: Tensor, t: Tensor, gradient: str, loss: Callable[[Tensor], Tensor], **kwargs: Any
) -> tuple[Tensor, list[Tensor]]:
    """The solution, and the gradients by y0, t and all parameters."""
    y0, t = y0.clone().requires_grad_(), t.detach().clone().requires_grad_()
    solution = odeint(func, y0, t, gradient=gradient, **kwargs)
    return solution.detach(), list(torch.autograd.grad(loss(solution), [y0, t, *func.parameters()]))


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative distance of two lists of gradients; one that is next to nothing beside the others hardly counts."""
    floor = 1e-3 * max(float(b.norm()) for b in theirs) + 1e-30
    return max(float((a - b).norm()) / max(float(b.norm()), floor) for a, b in zip(ours, theirs, strict=True))


def weighted(solution: Tensor) -> Tensor:
    """A loss on the states at all times."""
    return (solution * torch.linspace(0.5, 1.5, solution.numel(), dtype=solution.dtype).view_as(solution)).sin().sum()


class TestOrder:
    """y' = y cos t has y = exp(sin t - sin t0) y0, in both directions of time."""

    def func(self) -> nn.Module:
        class Growth(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Parameter(times(1.0))

            def forward(self, t: Tensor, y: Tensor) -> Tensor:
                return self.a * y * torch.cos(t)

        return Growth()

    @pytest.mark.parametrize("end", [1.7, -1.1])
    @pytest.mark.parametrize("method", FIXED)
    def test_errors_of_values_and_gradients_fall_with_the_order(self, method: str, end: float) -> None:
        exact = math.exp(math.sin(end) - math.sin(0.3))
        wanted = times(
            exact, exact, -exact * math.cos(0.3), exact * math.cos(end), exact * (math.sin(end) - math.sin(0.3))
        )
        errors = []
        for number in (40, 80):
            options = {"step_size": abs(end - 0.3) / number}
            solution, found = gradients(
                self.func(),
                times(1.0),
                times(0.3, end),
                "reversible",
                lambda y: y[-1].sum(),
                method=method,
                options=options,
            )
            error = (torch.cat([solution[-1], *found]) - wanted).abs()
            errors.append(torch.stack([error[0], error[1:].norm()]))
        slopes = torch.log2(errors[0] / errors[1])
        assert float(slopes.min()) > FIXED[method] - 0.1, slopes  # that of euler is higher: errors of y and z cancel
        assert float(slopes.max()) < FIXED[method] + 1.3, slopes

    @pytest.mark.parametrize("end", [1.7, -1.1])
    @pytest.mark.parametrize("method", ADAPTIVE)
    def test_steps_of_an_adaptive_method_have_its_order(self, method: str, end: float) -> None:
        """Steps of one size: ``min_step`` lets them pass."""
        exact = math.exp(math.sin(end) - math.sin(0.3))
        wanted = times(exact, exact, exact * math.cos(end), exact * (math.sin(end) - math.sin(0.3)))
        errors = []
        for number in (16, 32):
            t, stats = torch.linspace(0.3, end, number + 1, dtype=torch.float64), {}
            options: dict[str, Any] = {"min_step": 10.0, "stats": stats}
            solution, (by_y0, by_t, by_a) = gradients(
                self.func(), times(1.0), t, "reversible", lambda y: y[-1].sum(), method=method, options=options
            )
            assert stats["steps"] == number
            error = (torch.cat([solution[-1], by_y0, by_t[-1:], by_a]) - wanted).abs()
            errors.append(error.norm())  # alone, some pass through zero
        assert float(torch.log2(errors[0] / errors[1])) > ADAPTIVE[method] - 0.3, errors

    @pytest.mark.parametrize("method", [*FIXED, *ADAPTIVE])
    def test_func_is_evaluated_as_often_as_the_howto_says(self, method: str) -> None:
        stats: dict[str, int] = {}
        options = {"stats": stats, **({"step_size": 0.1} if method in FIXED else {})}
        odeint(lambda t, y: -y * t, times(1.0, 2.0), times(0.0, 1.0, 2.0), method=method, options=options)
        ahead = 1 if method in FIXED else 2  # to look at func, and for the first step size
        trial = (EVALUATIONS[method] + 1) // 2
        assert stats["evaluations"] == ahead + EVALUATIONS[method] * stats["steps"] + trial * stats["rejected"]


def forced(t: float) -> float:
    """y' = -5 (y - cos t), y(0) = 1."""
    return (25 * math.cos(t) + 5 * math.sin(t) + math.exp(-5 * t)) / 26


PROBLEMS: dict[str, Any] = {
    "decay": (lambda t, y: -y, [1.0], 20.0, lambda t: [math.exp(-t)], {"method": "rk4", "options": {"step_size": 0.1}}),
    "fast decay": (lambda t, y: -10 * y, [1.0], 10.0, lambda t: [math.exp(-10 * t)], {}),
    "forced": (lambda t, y: -5 * (y - torch.cos(t)), [1.0], 25.0, lambda t: [forced(t)], {}),
    "rotation": (lambda t, y: TURN @ y, [1.0, 0.0], 25.0, lambda t: [math.cos(t), -math.sin(t)], {}),
}


class TestSynchronising:
    @pytest.mark.parametrize("blend", [0.99, 0.999, 1.0])
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_errors_are_within_ten_times_the_plain_solvers(self, name: str, blend: float) -> None:
        torchdiffeq = pytest.importorskip("torchdiffeq", reason="torchdiffeq is not installed")
        func, start, end, solution, kwargs = PROBLEMS[name]
        stats: dict[str, int] = {}
        options = {**kwargs.get("options", {}), "blend": blend, "stats": stats}
        with torch.no_grad():
            ours = odeint(func, times(*start), times(0.0, end), **{**kwargs, "options": options})[-1]
            theirs = torchdiffeq.odeint(func, times(*start), times(0.0, end), **kwargs)[-1]
        exact = times(*solution(end))
        assert float((ours - exact).norm()) <= 10 * float((theirs - exact).norm())
        assert stats["anchors"] <= (0.5 if name == "fast decay" else 0.15) * stats["steps"]
        assert (stats["anchors"] == 0) == (name == "rotation")

    @pytest.mark.parametrize("method", [*FIXED, *ADAPTIVE])
    def test_gradients_pass_through_as_in_ordinary_autograd(self, method: str) -> None:
        stats: dict[str, int] = {}
        options = {"stats": stats, **({"step_size": 0.1} if method in FIXED else {})}
        kwargs = {"method": method, "options": options, "rtol": 1e-5, "atol": 1e-7}
        t = torch.linspace(0, 6, 4, dtype=torch.float64)
        found = [
            gradients(Rate(-3.0, 1.0), times(1.0, -2.0), t, how, weighted, **kwargs) for how in ("reversible", "store")
        ]
        assert stats["anchors"] > 3
        assert torch.equal(found[0][0], found[1][0])
        assert distance(found[0][1], found[1][1]) <= 1e-9

    def test_a_stiff_problem_with_fixed_steps_is_that_of_the_plain_solver(self) -> None:
        plain = (1 - 2 + 2 - 8 / 6 + 16 / 24) ** 10  # one step of rk4 with h = 2 multiplies by it
        ours = odeint(lambda t, y: -y, times(1.0), times(0.0, 20.0), method="rk4", options={"step_size": 2.0})[-1]
        assert float(ours) == pytest.approx(plain, rel=1e-12)


class TestGradients:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("method", ["euler", pytest.param("rk4", marks=pytest.mark.slow)])
    def test_a_thousand_steps_have_the_gradients_of_store(self, method: str, dtype: torch.dtype) -> None:
        y0, t = torch.linspace(-1, 1, 6, dtype=dtype).view(2, 3), torch.linspace(0, 5, 3, dtype=dtype)
        kwargs = {"method": method, "options": {"step_size": 0.005}}
        found = [gradients(Net().to(dtype), y0, t, how, weighted, **kwargs) for how in ("reversible", "store")]
        assert torch.equal(found[0][0], found[1][0])
        assert distance(found[0][1], found[1][1]) <= (1e-9 if dtype == torch.float64 else 1e-3)

    @pytest.mark.parametrize("method", [*FIXED, *ADAPTIVE])
    def test_all_strategies_agree(self, method: str) -> None:
        y0, t = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3), times(1.0, 0.6, -0.5)
        kwargs = {"method": method, "options": {"step_size": 0.1} if method in FIXED else {}}
        found = [
            gradients(Net().double(), y0, t, how, weighted, **kwargs) for how in ("reversible", "checkpoint", "store")
        ]
        for values, grads in found[:2]:
            assert torch.equal(values, found[2][0])
            assert distance(grads, found[2][1]) <= 1e-12

    @pytest.mark.parametrize("end", [1.0, -1.0])
    @pytest.mark.parametrize("method", [*FIXED, *ADAPTIVE])
    def test_gradcheck(self, method: str, end: float) -> None:
        func = Net(2, width=2).double()
        names = [name for name, _ in func.named_parameters()]
        options = {"step_size": 0.17} if method in FIXED else {"min_step": 10.0}  # the same steps, whatever is moved

        class Lent(nn.Module):
            def __init__(self, values: tuple[Tensor, ...]) -> None:
                super().__init__()
                self.func, self.values = func, dict(zip(names, values, strict=True))

            def forward(self, t: Tensor, y: Tensor) -> Tensor:
                return torch.func.functional_call(self.func, self.values, (t, y))

        def solved(y0: Tensor, t: Tensor) -> Tensor:
            return odeint(func, y0, t, method=method, options=options)

        y0 = times(0.3, -0.8, requires_grad=True)
        t = times(0.1, 0.4 * end, end, requires_grad=True)
        assert torch.autograd.gradcheck(solved, (y0, t))
        ours = torch.autograd.grad(weighted(solved(y0, t)), list(func.parameters()))
        values = tuple(parameter.detach().clone().requires_grad_() for parameter in func.parameters())

        def by_parameters(*values: Tensor) -> Tensor:
            return weighted(
                odeint(Lent(values), y0.detach(), t.detach(), method=method, options=options, gradient="store")
            )

        assert torch.autograd.gradcheck(by_parameters, values)
        theirs = torch.autograd.grad(by_parameters(*values), values)
        assert distance(list(ours), list(theirs)) <= 1e-10

    def test_by_times_they_are_the_slopes(self) -> None:
        """dy/dt_end = f(t_end, y), and dy/dt_0 = -(dy/dy_0) f(t_0, y_0)."""
        y0, t = times(0.7, requires_grad=True), times(0.2, 1.0, 2.0, requires_grad=True)
        func = Rate(0.6, 2.0)
        end = odeint(func, y0, t, rtol=1e-9, atol=1e-11)[-1].sum()
        by_y0, by_t = torch.autograd.grad(end, [y0, t])
        assert float(by_t[2]) == pytest.approx(func(t[2], end).item(), rel=1e-7)
        assert float(by_t[0]) == pytest.approx(-(by_y0 * func(t[0], y0)).item(), rel=1e-7)
        assert abs(float(by_t[1])) < 1e-7  # where a step lands on the way does not matter

    def test_losses_at_any_times_and_every_order_of_backward(self) -> None:
        func, y0 = Net().double(), torch.linspace(-1, 1, 3, dtype=torch.float64).requires_grad_()
        t, inputs = times(0.0, 0.5, 1.0, 1.5), [y0, *func.parameters()]

        def solve(gradient: str) -> Tensor:
            return odeint(func, y0, t, method="rk4", options={"step_size": 0.1}, gradient=gradient)

        ours, theirs = solve("reversible"), solve("store")
        for loss in (
            lambda y: y[1].sin().sum(),
            lambda y: y[3, 0] * y[1, 2],
            lambda y: y[0].sum() + y[2].square().sum(),
        ):
            for wrt in (inputs, [y0], [func.last.bias]):
                found = [
                    torch.autograd.grad(loss(y), wrt, retain_graph=True, allow_unused=True) for y in (ours, theirs)
                ]
                for a, b in zip(*found, strict=True):
                    assert (a is None and b is None) or float((a - b).norm()) <= 1e-12 * float(b.norm())  # type: ignore[operator]
        ours.sum().backward()
        with pytest.raises(RuntimeError, match="retain_graph"):
            ours.sum().backward()

    def test_noise_and_batch_statistics_are_those_of_forward(self) -> None:
        found = []
        for gradient in ("reversible", "checkpoint", "store"):
            func = Net(dropout=0.3, norm=True).double()
            torch.manual_seed(5)
            y0 = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
            kwargs = {"method": "midpoint", "options": {"step_size": 0.1}}
            solution, grads = gradients(func, y0, times(0.0, 1.0), gradient, weighted, **kwargs)
            found.append((solution, grads, func.norm.running_mean, torch.rand(1)))
        for solution, grads, mean, drawn in found[:2]:
            assert torch.equal(solution, found[2][0])
            assert distance(grads, found[2][1]) <= 1e-11
            assert torch.equal(mean, found[2][2])
            assert torch.equal(drawn, found[2][3])

    def test_noise_in_steps_on_trial(self) -> None:
        """Steps that are rejected draw, too; those that are taken are replayed with their own noise."""
        found = []
        for gradient in ("reversible", "store"):
            func, stats = Net(dropout=0.5).double(), {}
            torch.manual_seed(5)
            kwargs = {"rtol": 2e-3, "atol": 2e-3, "options": {"stats": stats, "max_num_steps": 500, "min_step": 0.05}}
            found.append(gradients(func, times(0.5, -1.0, 2.0), times(0.0, 4.0), gradient, weighted, **kwargs))
            assert stats["rejected"] > 0
        assert torch.equal(found[0][0], found[1][0])
        assert distance(found[0][1], found[1][1]) <= 1e-10

    def test_autocast_is_restored(self) -> None:
        found = []
        for gradient in ("reversible", "store"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                solution = odeint(
                    func := Net(),
                    torch.ones(2, 3),
                    torch.linspace(0, 1, 2),
                    method="rk4",
                    options={"step_size": 0.1},
                    gradient=gradient,
                )
            assert solution.dtype == torch.float32
            found.append(torch.autograd.grad(solution.square().sum(), list(func.parameters())))
        assert distance(list(found[0]), list(found[1])) <= 2e-2

    def test_frozen_parameters_and_no_gradient_at_y0(self) -> None:
        func = Net().double()
        func.first.requires_grad_(False)
        for y0 in (times(1.0, 2.0, 3.0), times(1.0, 2.0, 3.0, requires_grad=True)):
            found = []
            for gradient in ("reversible", "store"):
                func.zero_grad()
                odeint(func, y0, times(0.0, 1.0), gradient=gradient).sum().backward()
                assert func.first.weight.grad is None
                found.append([func.last.weight.grad.clone(), func.last.bias.grad.clone()])
            assert distance(*found) <= 1e-11

    def test_without_gradients_the_values_are_the_same(self) -> None:
        func, y0, t = Net().double(), times(1.0, 2.0, 3.0), times(0.0, 1.0, 3.0)
        tracked = odeint(func, y0, t)
        with torch.no_grad():
            plain = odeint(func, y0, t)
        assert tracked.requires_grad
        assert not plain.requires_grad
        assert torch.equal(tracked, plain)
        assert not odeint(func.requires_grad_(False), y0, t).requires_grad

    def test_a_divergence_by_autograd_inside_func(self) -> None:
        """Continuous normalizing flows differentiate in func."""

        class Flow(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net(2).double()

            def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                with torch.enable_grad():
                    y = state[0].requires_grad_()
                    slope = self.net(t, y)
                    trace = sum(torch.autograd.grad(slope[:, i].sum(), y, create_graph=True)[0][:, i] for i in range(2))
                return slope, -trace

        found = []
        for gradient in ("reversible", "store"):
            func, y0 = Flow(), torch.tensor([[0.1, 0.4], [-0.7, 0.2]], dtype=torch.float64)
            y, log_density = odeint(func, (y0, y0.new_zeros(2)), times(1.0, 0.0), gradient=gradient)
            assert not y0.requires_grad
            assert y.shape == (2, 2, 2)
            assert log_density.shape == (2, 2)
            (y[-1].square().sum() + log_density[-1].sum()).backward()
            found.append([p.grad for p in func.parameters() if p.grad is not None])
        assert distance(*found) <= 1e-10

    def test_a_method_of_a_module_has_the_gradients_of_its_module(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net().double()

            def slope(self, t: Tensor, y: Tensor) -> Tensor:
                return self.net(t, y)

        model, y0 = Model(), times(1.0, 2.0, 3.0)
        odeint(model.slope, y0, times(0.0, 1.0)).sum().backward()
        ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        odeint(model.net, y0, times(0.0, 1.0), gradient="store").sum().backward()
        assert distance(ours, [p.grad for p in model.parameters() if p.grad is not None]) <= 1e-11

    def test_func_may_not_use_other_tensors_that_require_grad(self) -> None:
        net, y0 = Net().double(), times(1.0, 2.0, 3.0)
        with pytest.raises(
            ValueError, match=r"shape .* requires grad and is not its parameter: make func a torch\.nn\.Module"
        ):
            odeint(lambda t, y: net(t, y), y0, times(0.0, 1.0))
        ours = odeint(lambda t, y: net(t, y), y0, times(0.0, 1.0), gradient="store")
        ours.sum().backward()
        assert net.last.bias.grad is not None

    def test_a_tensor_that_func_uses_only_later_is_refused_in_backward(self) -> None:
        late = times(2.0, requires_grad=True)
        solution = odeint(lambda t, y: -y * late if t > 0.5 else -y, times(1.0, requires_grad=True), times(0.0, 1.0))
        with pytest.raises(BranchError, match="requires grad but is neither its parameter"):
            solution.sum().backward()

    def test_second_derivatives_need_store(self) -> None:
        func, y0 = Net().double(), times(1.0, 2.0, 3.0, requires_grad=True)
        with pytest.raises(RuntimeError, match="gradient='store'"):
            torch.autograd.grad(odeint(func, y0, times(0.0, 1.0)).sum(), y0, create_graph=True)
        (first,) = torch.autograd.grad(odeint(func, y0, times(0.0, 1.0), gradient="store").sum(), y0, create_graph=True)
        assert torch.autograd.grad(first.sum(), y0)[0].abs().sum() > 0

    def test_a_parameter_changed_before_backward_raises(self) -> None:
        func = Net().double()
        solution = odeint(func, times(1.0, 2.0, 3.0), times(0.0, 1.0))
        with torch.no_grad():
            func.last.bias.add_(1.0)
        with pytest.raises(RuntimeError, match="modified in place"):
            solution.sum().backward()

    def test_growing_solutions_are_refused_or_anchored(self) -> None:
        y0 = times(1.0, requires_grad=True)
        kwargs: dict[str, Any] = {"method": "rk4", "options": {"step_size": 0.1}}
        with pytest.raises(ReversalError):
            odeint(Rate(1.0), y0, times(0.0, 20.0), **kwargs)[-1].backward()
        kwargs["options"]["anchor_every"] = 20
        _, ours = gradients(Rate(1.0), y0.detach(), times(0.0, 20.0), "reversible", lambda y: y[-1].sum(), **kwargs)
        _, theirs = gradients(Rate(1.0), y0.detach(), times(0.0, 20.0), "store", lambda y: y[-1].sum(), **kwargs)
        assert distance(ours, theirs) <= 1e-9

    def test_verify_notices_a_func_that_changed(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls = 0

            def forward(self, t: Tensor, y: Tensor) -> Tensor:
                self.calls += 1
                return -y * self.calls

        y0 = times(1.0, requires_grad=True)
        kwargs: dict[str, Any] = {"method": "midpoint", "options": {"step_size": 0.01}}
        with pytest.raises(ReversalError):
            odeint(Counting(), y0, times(0.0, 0.1), **kwargs).sum().backward()
        odeint(Counting(), y0, times(0.0, 0.1), verify=False, **kwargs).sum().backward()


class TestMemory:
    STATE = 2 * 500 * 8
    PRINTS = 2 * 32 * 8  # fingerprints of the first state and of Ψ

    def kept(self, number: int, method: str = "rk4", **options: Any) -> tuple[int, int]:
        """Bytes kept after `number` steps of a rotation, and the anchors."""
        y0 = torch.linspace(-1, 1, 1000, dtype=torch.float64).view(2, 500).requires_grad_()
        stats: dict[str, int] = {}
        chosen = {"step_size": 6.0 / number, **options} if method in FIXED else options
        with SavedTensors([TURN]) as saved:
            odeint(lambda t, y: TURN @ y, y0, times(0.0, 6.0), method=method, options={**chosen, "stats": stats})
        return saved.num_bytes, stats["anchors"]

    @pytest.mark.parametrize("method", ["midpoint", "heun2", "rk4"])
    def test_it_is_flat_on_a_rotation(self, method: str) -> None:
        numbers = (10, 100, 1000) if method == "rk4" else (10, 100)
        assert {self.kept(number, method) for number in numbers} == {(2 * self.STATE + self.PRINTS, 0)}

    def test_it_is_pair_and_anchors(self) -> None:
        num_bytes, anchors = self.kept(200, anchor_every=50)
        assert anchors == 3
        assert num_bytes == (1 + anchors) * (2 * self.STATE + self.PRINTS)

    def test_adaptive_steps_keep_times_only(self) -> None:
        assert self.kept(0, "dopri5") == (2 * self.STATE + self.PRINTS, 0)

    def test_synchronised_pairs_are_kept(self) -> None:
        y0, stats = torch.ones(1000, dtype=torch.float64, requires_grad=True), {}
        with SavedTensors() as saved:
            odeint(lambda t, y: -10 * y, y0, times(0.0, 10.0), options={"stats": stats})
        assert stats["anchors"] > 5
        stretches = stats["anchors"] + 1  # the last one may end as it begins
        trials = stats["rejected"] * self.PRINTS
        assert (
            0
            <= stretches * (2 * y0.nbytes + self.PRINTS) + trials - saved.num_bytes
            <= 2 * y0.nbytes + self.PRINTS + trials
        )


class TestArguments:
    def test_a_tuple_is_solved_as_its_parts(self) -> None:
        y0 = torch.tensor([[1.0, 0.5]], dtype=torch.float64), times(2.0)[0]
        first, second = odeint(lambda t, y: (-y[0] * t, y[1] * 0.5), y0, times(0.0, 1.0, 2.0))
        torch.testing.assert_close(first[-1], y0[0] * math.exp(-2.0), rtol=1e-6, atol=0)
        torch.testing.assert_close(second[-1], y0[1] * math.exp(1.0), rtol=1e-6, atol=0)
        assert (first.shape, second.shape) == ((3, 1, 2), (3,))

    def test_a_time_alone_and_a_scalar(self) -> None:
        y0 = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        assert odeint(lambda t, y: -y, y0, times(0.0)).tolist() == [2.0]
        solution = odeint(lambda t, y: -y, y0, times(0.0, 1.0))
        assert float(torch.autograd.grad(solution[-1], y0)[0]) == pytest.approx(math.exp(-1.0), rel=1e-6)

    def test_neither_y0_nor_the_solution_shares_memory_with_the_walk(self) -> None:
        func, y0 = Net().double(), torch.ones(2, 3, dtype=torch.float64).t().contiguous().t()
        solution = odeint(func, y0, times(0.0, 1.0))
        expected = torch.autograd.grad(solution.sum(), list(func.parameters()))
        again = odeint(func, y0, times(0.0, 1.0))
        y0.zero_()
        again.detach().zero_()
        assert distance(list(torch.autograd.grad(again.sum(), list(func.parameters()))), list(expected)) == 0.0

    def test_a_grid_of_ones_own(self) -> None:
        seen: list[float] = []

        def func(t: Tensor, y: Tensor) -> Tensor:
            seen.append(float(t))
            return -y

        grid = times(0.0, 0.25, 1.5, 2.0)
        options = {"grid_constructor": lambda func, y0, t: grid}
        odeint(func, times(1.0), times(0.0, 1.0, 2.0), method="euler", options=options)
        assert sorted(set(seen)) == [0.0, 0.25, 1.0, 1.5, 2.0]

    @pytest.mark.parametrize("name", ["dopri8", "adaptive_heun", "implicit_adams"])
    def test_methods_of_torchdiffeq_that_are_not_here_are_refused_by_name(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"odeint has not torchdiffeq's method '{name}'"):
            odeint(lambda t, y: y, times(1.0), times(0.0, 1.0), method=name)

    def test_other_things_of_torchdiffeq_are_refused_by_name(self) -> None:
        def refused(match: str, func: Any = lambda t, y: y, **kwargs: Any) -> None:
            with pytest.raises(ValueError, match=match):
                odeint(func, times(1.0), times(0.0, 1.0), **kwargs)

        refused("argument 'event_fn'", event_fn=lambda t, y: y)
        refused("argument 'adjoint_params'", adjoint_params=())
        refused("option 'jump_t'", options={"jump_t": times(0.5)})
        func = Rate(1.0)
        func.callback_step = lambda t, y, h: None  # type: ignore[assignment]
        refused("attribute of func 'callback_step'", func=func)
        with pytest.raises(TypeError, match="no argument 'tolerance'"):
            odeint(lambda t, y: y, times(1.0), times(0.0, 1.0), tolerance=1)

    WRONG: dict[str, tuple[dict[str, Any], str]] = {  # noqa: RUF012
        "method": ({"method": "dopri"}, "unknown method 'dopri'; nearest: dopri5"),
        "option": ({"options": {"step_size": 0.1}}, "unknown option of dopri5 'step_size'"),
        "adaptive option": ({"method": "rk4", "options": {"min_step": 0.1}}, "unknown option of rk4 'min_step'"),
        "blend": ({"options": {"blend": 1.5}}, "blend must be one positive number, at most 1, got 1.5"),
        "step_size": (
            {"method": "rk4", "options": {"step_size": 0.0}},
            "step_size must be one positive number, got 0.0",
        ),
        "rtol": ({"rtol": (1e-3, 1e-4)}, "rtol must be one positive number"),
        "gradient": ({"gradient": "adjoint"}, "must be one of 'reversible', 'checkpoint', 'store', got 'adjoint'"),
        "times": ({"t": times(0.0, 2.0, 1.0)}, "strictly increasing or decreasing"),
        "equal times": ({"t": times(0.0, 1.0, 1.0)}, "strictly increasing or decreasing"),
        "integer times": ({"t": torch.arange(3)}, "t must be a floating-point tensor of one dimension"),
        "complex": ({"y0": torch.ones(2, dtype=torch.complex64)}, "y0 must be floating-point, real"),
        "not finite": ({"y0": times(math.nan)}, "y0 must be .* finite"),
        "two dtypes": ({"y0": (times(1.0), torch.ones(1))}, "of one dtype"),
        "shape": ({"func": lambda t, y: torch.ones(3)}, r"must return what y is, of shape .*\[2\].* got .*\[3\]"),
        "dtype": ({"func": lambda t, y: y.float()}, "must keep the dtype of y, torch.float64, got torch.float32"),
        "grid": (
            {"method": "rk4", "options": {"grid_constructor": lambda f, y, t: t.flip(0)}},
            "from t.0. to t.-1. in this order",
        ),
        "slope": ({"func": lambda t, y: y / 0}, "not finite at t = 0"),
        "explosion": (
            {"func": lambda t, y: y**2, "t": times(0.0, 2.0)},
            "the step size fell to .* at t = 1: the solution ends",
        ),
        "many steps": ({"options": {"max_num_steps": 3}}, "max_num_steps=3 do not reach t = 1"),
        "overflow": ({"func": lambda t, y: 1e200 * y**3, "method": "rk4"}, "not finite at t = 1: give smaller steps"),
    }

    @pytest.mark.parametrize("name", WRONG)
    def test_what_is_wrong_raises_one_sentence(self, name: str) -> None:
        changed, sentence = self.WRONG[name]
        call = {"func": lambda t, y: y * t.cos(), "y0": times(1.0, 1.0), "t": times(0.0, 1.0), **changed}
        with pytest.raises(ValueError, match=sentence):
            odeint(call.pop("func"), call.pop("y0"), call.pop("t"), **call)

    def test_y0_must_be_tensors(self) -> None:
        with pytest.raises(TypeError, match="y0 must be a tensor, or a tuple of tensors, got float"):
            odeint(lambda t, y: y, 1.0, times(0.0, 1.0))


class TestUndo:
    """`Walk.undo`, which steps on trial need."""

    @pytest.mark.parametrize(
        "options", [{}, {"backprop": "checkpoint"}, {"anchor_every": 2}, {"backprop": "store"}], ids=str
    )
    def test_a_walk_with_steps_undone_is_one_without_them(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        branches = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2)).double() for _ in range(5)]
        other = nn.Linear(4, 4).double()
        found = []
        for trials in (True, False):
            x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
            walk = Walk(MidPoint(h=0.2), **options)
            state = walk.enter(x)
            for number, branch in enumerate(branches):
                if trials:
                    walk.step(other, state)
                    walk.undo(state)
                torch.manual_seed(number)
                state = walk.step(branch, state)
            parameters = [p for branch in branches for p in branch.parameters()]
            found.append(torch.autograd.grad(walk.leave(state).sin().sum(), [x, *parameters]))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)

    def test_it_takes_the_pair_before_the_newest_step(self) -> None:
        walk = Walk(MidPoint(h=0.2))
        first = walk.enter(torch.randn(2, 4))
        with pytest.raises(ValueError, match="the pair that the newest step was made from"):
            walk.undo(first)
        second = walk.step(nn.Linear(4, 4), first)
        walk.step(nn.Linear(4, 4), second)
        with pytest.raises(ValueError, match="the pair that the newest step was made from"):
            walk.undo(first)


class TestJudge:
    """torchdiffeq 0.2.5 over its own test problems."""

    T = torch.linspace(1, 8, 10, dtype=torch.float64)

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(times(0.2)), nn.Parameter(times(3.0))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.a + (y - (self.a * t + self.b)) ** 5

    class Sine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(times(2.0))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.a * y / t + t**4 * torch.sin(2 * t) - t**2 + 4 * t**3

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            mixed = torch.randn(5, 5, dtype=torch.float64) * 0.1
            self.a = nn.Parameter(mixed - mixed.t())

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.a @ y

    @pytest.mark.parametrize(
        ("method", "backwards"), [("rk4", False), ("bosh3", False), ("dopri5", False), ("dopri5", True)]
    )
    @pytest.mark.parametrize("name", ["constant", "sine", "linear", "exp"])
    def test_values_and_gradients_agree(self, name: str, method: str, backwards: bool) -> None:
        torchdiffeq = pytest.importorskip("torchdiffeq", reason="torchdiffeq is not installed")
        make = {"constant": self.Constant, "sine": self.Sine, "linear": self.Linear, "exp": lambda: Rate(-0.2)}[name]
        first = {"constant": [3.2], "sine": [0.15], "linear": [1.0, 2.0, 3.0, 2.0, 1.0], "exp": [1.0]}[name]
        kwargs: dict[str, Any] = (
            {"method": method, "options": {"step_size": 7 / 90}} if method == "rk4" else {"method": method}
        )
        kwargs |= {"rtol": 1e-5, "atol": 1e-7} if method == "bosh3" else {"rtol": 1e-9, "atol": 1e-11}
        scale = {"constant": 5.0, "sine": 1e4, "linear": 5.0, "exp": 1.0}[name]
        t, found = self.T, []
        if backwards:
            t = t.flip(0)
            with torch.no_grad():
                first = odeint(make(), times(*first), self.T, **kwargs)[-1].tolist()
        for solve in (odeint, torchdiffeq.odeint):
            func, y0 = make(), times(*first, requires_grad=True)
            solution = solve(func, y0, t, **kwargs)
            found.append((solution.detach(), torch.autograd.grad(weighted(solution / scale), [y0, *func.parameters()])))
        assert float((found[0][0] - found[1][0]).abs().max()) <= (5e-3 if method == "bosh3" else 5e-5) * scale
        assert distance(list(found[0][1]), list(found[1][1])) <= (2e-2 if method == "bosh3" else 2e-3)

    def test_a_gradient_that_its_adjoint_gets_wrong(self) -> None:
        """Solved backwards, a state that had settled flies away (torchdiffeq issue 88)."""
        torchdiffeq = pytest.importorskip("torchdiffeq", reason="torchdiffeq is not installed")

        class Driven(nn.Module):
            """x' = a x sin z, and z is pulled to cos t."""

            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Parameter(times(1.0))

            def forward(self, t: Tensor, y: Tensor) -> Tensor:
                x, z = y.unbind(-1)
                return torch.stack([self.a[0] * x * torch.sin(z), -5 * (z - torch.cos(t))], -1)

        found = []
        fixed: dict[str, Any] = {"method": "rk4", "options": {"step_size": 0.05}}
        tight: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
        for solve, kwargs in ((odeint, fixed), (torchdiffeq.odeint_adjoint, fixed), (torchdiffeq.odeint, tight)):
            func = Driven()
            solve(func, times(1.0, 1.0), times(0.0, 8.0), **kwargs)[-1, 0].backward()
            assert func.a.grad is not None
            found.append(float(func.a.grad))
        assert found[0] == pytest.approx(found[2], rel=1e-6)
        assert abs(found[1] - found[2]) > 0.1 * abs(found[2])
