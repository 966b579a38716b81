"""One process or many: ranks, sums over all processes, and the replicated network.

Under ``torchrun`` every process runs the same program. Rank 0 alone writes; batches are disjoint shares of one global
batch; sums go over all processes. Without it, everything here is the identity.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from revode.engine import OutOfRange
from revode_lab.system import read_json, read_json_lines
from revode_lab.training.config import Config, ExecutionConfig, from_leaves
from revode_lab.training.terminal import Interrupted, Interruption

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The processes of a run, seen from one of them."""

    rank: int
    world_size: int
    device: torch.device
    hosts: Any = None
    """The group in which hosts exchange numbers without their devices; None is the only one."""

    @property
    def leads(self) -> bool:
        """True for the process that writes files and prints."""
        return self.rank == 0

    @property
    def widest(self) -> torch.dtype:
        """The floating-point type for sums: float64, where the device has it."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def forked_randomness(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that restores the RNG states."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all processes."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.hosts if tensor.is_cpu else None)
        return tensor

    def largest(self, value: int) -> int:
        """Return the largest of all processes' values."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.hosts)
        return int(tensor)

    def on_grid(self, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return network(x). If states leave the grid in one process, all raise `OutOfRange`, so that none waits."""
        fault, found = None, x
        try:
            found = network(x)
        except OutOfRange as error:
            fault = error
        if self.largest(int(fault is not None)):
            raise fault or OutOfRange("states left the range of the grid in another process")
        return found

    def decided_by_leader(self, decide: Callable[[], T]) -> T:
        """Return the decision of rank 0 in all processes. On bad input rank 0 raises, and the others exit without a message."""
        if self.world_size == 1:
            return decide()
        answers: list[T | ValueError | None] = [None]
        if self.leads:
            try:
                answers = [decide()]
            except ValueError as error:
                answers = [error]
        dist.broadcast_object_list(answers, src=0, group=self.hosts)
        if isinstance(answers[0], ValueError):
            raise answers[0] if self.leads else SystemExit(2)
        return cast(T, answers[0])

    def share_buffers(self, model: nn.Module) -> None:
        """Give every process rank 0's buffers."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order of rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.hosts)
        return values


@contextlib.contextmanager
def process_group(config: ExecutionConfig) -> Iterator[Group]:
    """Join the processes that torchrun started, or be alone."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = choose_device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    if config.threads:
        torch.set_num_threads(config.threads)
    if world_size == 1:
        yield Group(0, 1, device)
        return
    joined_here = not dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # collectives of objects use the current one
    if joined_here:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Group(rank, world_size, device, dist.new_group(backend="gloo") if device.type == "cuda" else None)
    finally:
        if joined_here:
            dist.destroy_process_group()
            # DistributedDataParallel keeps gloo's threads alive. One that still holds a tensor of the last exchange needs
            # the interpreter to let go of it, and aborts the process if the interpreter ends first. Here it gets its turn.
            time.sleep(_LETTING_GO)


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device called `name`; ``auto`` is this process's GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used ({reason}); use --device cpu or auto") from error
    return device


def replicate(model: nn.Module, group: Group) -> nn.Module:
    """Return the module to call in training: the model itself, or its replica (DDP)."""
    if group.world_size == 1:
        return model
    devices = [group.device.index] if group.device.type == "cuda" else None
    # Statistics matter in evaluation only, which shares rank 0's: no need to share them in every step.
    # (Older versions of torch call that option broadcast_buffers.)
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"device_ids": devices, name: False}
    return nn.parallel.DistributedDataParallel(model, **options)


_LETTING_GO = 0.3
"""Seconds that gloo's threads have to let go of their tensors."""

_POLL, _PATIENCE = 0.2, 30.0
"""Seconds between looks at the processes, and until those are killed whose peer has failed."""


class ProcessFailed(RuntimeError):
    """A process of a training ended with an error, which it has printed."""


def train_in_processes(config: Config, folder: Path, num_processes: int) -> dict[str, Any]:
    """Train into `folder`, or go on with the run there, and return the content of its ``result.json``.

    Each process takes an equal share of every batch. Without a number of threads, the cores are divided among the processes.

    Raises:
        ProcessFailed: One of them failed, or the training diverged.
        Interrupted: A signal stopped the run after it was saved.
    """
    if not config.execution.threads:
        threads = max(1, torch.get_num_threads() // num_processes)
        config = from_leaves({**config.leaves(), "threads": threads})
    with tempfile.TemporaryDirectory() as scratch, Interruption() as interruption:
        file = Path(scratch) / "config.yaml"
        file.write_text(config.to_yaml(), encoding="utf-8")
        processes = _start(file, folder, num_processes, config.execution.threads)
        try:
            codes = _wait(processes, interruption)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        result = read_json(folder / "result.json")
        if not any(codes) and result is not None:
            return result
        if interruption.signal_number:
            steps = [line["step"] for line in read_json_lines(folder / "metrics.jsonl")]
            raise Interrupted(interruption.signal_number, max(steps, default=0), folder)
        if 2 in codes:
            raise ValueError(f"the training in {folder} was refused, as said above")
        raise ProcessFailed(f"the training in {folder} failed in one of {num_processes} processes (exit codes {codes})")


def _start(file: Path, folder: Path, num_processes: int, threads: int) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "revode_lab.cli", "train", "--config", str(file), "--out", str(folder)]
    shared = {
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": str(threads),
    }
    return [
        subprocess.Popen(
            [*command, "--resume", "auto"], env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(num_processes)
    ]


def _wait(processes: list[subprocess.Popen[bytes]], interruption: Interruption) -> list[int]:
    """Return the exit codes. A signal is passed on once; when one process fails, the others get a moment to do so too."""
    told, deadline = False, float("inf")
    while any(process.poll() is None for process in processes):
        if interruption.signal_number and not told:
            told = True
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if deadline == float("inf") and any(process.poll() for process in processes):
            deadline = time.monotonic() + _PATIENCE
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(_POLL)
    return [process.wait() for process in processes]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
