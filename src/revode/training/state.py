"""All that a run must remember to go on as if it had never stopped, to and from a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from revode.training.distributed import copy_whole, whole
from revode.training.job import Job, StepResult
from revode.training.optimization import random_states, restore_random_states


@dataclass
class Position:
    """Where a run stands.

    Attributes:
        step: Updates done; epoch and place in it follow from it.
        evaluated_at: The step of the last evaluation.
        best_accuracy: On the validation split, or None.
        best_step: Where that was.
        seconds: Spent training, over all its processes' lives.
        peak_activation_bytes: Measured on the first update.
        loss_sum, num_correct, num_images: This process's sums since the last line of metrics.
    """

    step: int = 0
    evaluated_at: int = -1
    best_accuracy: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    peak_activation_bytes: int = 0
    loss_sum: float = 0.0
    num_correct: int = 0
    num_images: int = 0

    def count(self, result: StepResult) -> None:
        """Add one update's sums."""
        self.loss_sum += result.loss_sum
        self.num_correct += result.num_correct
        self.num_images += result.num_images

    def clear(self) -> None:
        """Start the sums anew."""
        self.loss_sum, self.num_correct, self.num_images = 0.0, 0, 0


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state on the CPU, put together from all processes; all of them must call it."""
    return {name: whole(tensor.detach()).cpu() for name, tensor in model.state_dict().items()}


def collect(job: Job, position: Position, plan: dict[str, Any], metrics_offset: int) -> dict[str, Any]:
    """The state of a run in types that load with ``weights_only=True``. All processes must call it."""
    optimizer = job.optimizer.state_dict()
    momenta = {
        index: {name: whole(value).cpu() if isinstance(value, Tensor) else value for name, value in entry.items()}
        for index, entry in optimizer["state"].items()
    }
    average = None
    if job.average is not None:
        tensors = {name: whole(tensor).cpu() for name, tensor in job.average.tensors.items()}
        average = {"num_updates": job.average.num_updates, "tensors": tensors}
    processes = job.group.gather({"random": random_states(), "position": asdict(position)})
    return {
        "step": position.step,
        "config": job.config.to_dict(),
        "model": weights(job.model),
        "momenta": momenta,
        "average": average,
        "scaler": job.scaler.state_dict(),
        "processes": processes,
        "plan": plan,
        "metrics_offset": metrics_offset,
    }


def restore(job: Job, state: dict[str, Any]) -> Position:
    """Put a run back to where `collect` found it, and return its position."""
    own = job.model.state_dict()
    if own.keys() != state["model"].keys():
        odd = sorted(own.keys() ^ state["model"].keys())[0]
        raise ValueError(f"the checkpoint does not fit {job.config.model.name}: only one of them has {odd!r}")
    for name, tensor in own.items():
        copy_whole(tensor, state["model"][name])
    _restore_momenta(job, state["momenta"])
    if job.average is not None and state["average"] is not None:
        job.average.num_updates = state["average"]["num_updates"]
        for name, tensor in job.average.tensors.items():
            copy_whole(tensor, state["average"]["tensors"][name])
    job.scaler.load_state_dict(state["scaler"])
    processes = state["processes"]
    if len(processes) != job.group.world_size:
        # Sums of a line in progress cannot be shared out anew; give them all to the first.
        entries = [Position(**process["position"]) for process in processes]
        position = entries[0]
        if job.group.leads:
            for entry in entries[1:]:
                position.count(StepResult(entry.loss_sum, entry.num_correct, entry.num_images, 0.0))
        else:
            position.clear()
        return position
    mine = processes[job.group.rank]
    restore_random_states(mine["random"])
    return Position(**mine["position"])


def _restore_momenta(job: Job, momenta: dict[int, dict[str, Any]]) -> None:
    """Give each parameter its momentum, in the layout and the shard that the parameter has."""
    parameters = [p for group in job.optimizer.param_groups for p in group["params"]]
    for index, entry in momenta.items():
        parameter = parameters[index]
        restored = dict(entry)
        for name, value in entry.items():
            if isinstance(value, Tensor):
                restored[name] = parameter.detach().clone()
                copy_whole(restored[name], value)
        job.optimizer.state[parameter] = restored
