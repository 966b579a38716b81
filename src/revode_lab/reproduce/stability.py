"""The theory's claims, measured on the networks as they are initialised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from revode.networks import FAMILIES
from revode_lab import charts, data
from revode_lab.reproduce.item import ABSENT, TINY, Budget, Chart, Findings, Item, Outcome, Table
from revode_lab.reproduce.task import NetworkTask, Setup


@dataclass(frozen=True, kw_only=True)
class StabilityAnalysis(NetworkTask):
    """The stability analysis of a network with initial weights."""

    num_images: int = 16
    seed: int = 0

    @property
    def title(self) -> str:
        return f"stability of {self.name} on {self.dataset}, seed {self.seed}"

    def flops(self) -> float:
        return 300 * self.num_images * self.forward_flops()

    def measure(self, setup: Setup) -> dict[str, Any]:
        from revode import create_model
        from revode_lab.stability import analyze

        dataset = data.load(self.dataset, setup.data_root)
        batch = dataset.split("test").take(torch.arange(self.num_images))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = create_model(self.model, **dataset.network_options, **self.options)
        found = analyze(model, data.standardise(batch.images, dataset), batch.labels, seed=self.seed)
        depths, growth = found.lyapunov.over_depth()
        values = torch.cat(list(found.spectra.values()))
        wanted = (
            "layers", "perturbation_growth", "lyapunov_exponents", "step_usage", "max_real_part", "spectral_radius",
            "axis_distance", "signal_growth", "gradient_growth",
        )  # fmt: skip
        numbers = found.to_dict()
        return {
            **{name: numbers[name] for name in wanted},
            "family": model.config.family,
            "reconstruction_error": found.reconstruction_error,
            "eigenvalues": [values.real.tolist(), values.imag.tolist()],
            "growth_over_depth": [depths, growth[:, 0].tolist()],
        }


NOTE = "Networks with initial weights on 16 CIFAR-10 images. Nothing is trained."
NETWORKS = {
    "cpu": ("hamiltonian-74", "hamiltonian-1layer-74", "midpoint-26", "leapfrog-26", "revnet-38"),
    "paper": ("hamiltonian-218", "hamiltonian-1layer-74", "midpoint-62", "leapfrog-62", "revnet-110"),
}
BUDGETS = {
    "smoke": Budget(
        "Smoke budget: networks of a few channels on two digits. The numbers mean little.",
        "smoke",
        [
            StabilityAnalysis(model=name, dataset="digits", num_images=2, options=TINY)
            for name in ("hamiltonian-74", "revnet-38")
        ],
    ),
    **{
        name: Budget(NOTE, name, [StabilityAnalysis(model=model) for model in models])
        for name, models in NETWORKS.items()
    },
}
COLUMNS = {
    "largest Re λ": ("max_real_part", ".2g"),
    "max abs Re λ / max abs λ": ("axis_distance", ".1e"),
    "h in use, of its bound": ("step_usage", ".0%"),
    "growth of perturbations": ("perturbation_growth", ".3g"),
    "growth of the signal": ("signal_growth", ".3g"),
    "growth of the gradient": ("gradient_growth", ".3g"),
    "reconstruction error, float32": ("reconstruction_error", ".1e"),
}
"""Head of a column -> which number stands in it, and its format."""


def show(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Show the claims beside the measurements; eigenvalues, growth, and the map of the linear RevNet."""
    from revode_lab.stability.figures import linear_revnet_map

    rows, clouds, curves = [], {}, {}
    for task, result, _ in outcomes:
        name = task.name if task.seed == 0 else f"{task.name}, seed {task.seed}"
        row = {"network": name, "layers": str(result["layers"]), "paper's theory": FAMILIES[result["family"]].theory}
        for head, (key, form) in COLUMNS.items():
            row[head] = ABSENT if result[key] is None else format(result[key], form)
        rows.append(row)
        clouds[name], curves[name] = tuple(result["eigenvalues"]), tuple(result["growth_over_depth"])
    found = [
        Chart(charts.eigenvalues(clouds), "Eigenvalues of the frozen ODE on a patch of the state, all units.", "spectra"),
        Chart(charts.lines(curves, "depth, blocks", "growth of a perturbation, factor", log_y=True),
              "Growth of the fastest-growing perturbation inside the units, over depth.", "growth"),
        Chart(linear_revnet_map(),
              "Growth of a linear RevNet, F(z) = βz and G(y) = αy, in a block: it is stable only between the white lines.",
              "linear-revnet"),
    ]  # fmt: skip
    remark = (
        "The paper's argument freezes the coefficients: imaginary eigenvalues at one depth do not bound the growth over many. "
        "The growth of perturbations is measured along the whole network."
    )
    return Findings([Table(rows)], found, [remark])


ITEMS = (Item("stability", "Stability: theory and measurement", BUDGETS, show),)
