"""What must not change by accident: seeded weights, parameter counts, JSON of the commands, files of a run, old checkpoints.

    python tests/revode_lab/frozen/write.py                   # freeze anew: rewrites behaviour.json (say why in CHANGELOG.md)
    python tests/revode_lab/frozen/write.py --run             # also the old run that must still resume
    python tests/revode_lab/frozen/write.py --exact FILE      # exact digests and help texts, to compare versions

Bits depend on the processor, so the tests compare statistics of the weights; the digests of ``--exact`` are for one machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from revode.networks import create_model, list_models
from revode_lab.cli import COMMANDS, main
from revode_lab.training import Interrupted, configure, train

HERE = Path(__file__).parent
BEHAVIOUR = HERE / "behaviour.json"
OLD_RUN = HERE / "run"
NUM_STEPS = 20
_SETTINGS: dict[str, Any] = {
    "dataset": "digits",
    "epochs": None,
    "max_steps": NUM_STEPS,
    "threads": 1,
    "device": "cpu",
    "log_every": 5,
    "checkpoint_every": 10,
}
_SMALL = {
    **_SETTINGS,
    "train_fraction": 0.2,
    "validation": 0.1,
    "batch_size": 16,
    "ema": 0.9,
    "options": {"blocks": [1, 1], "channels": [4, 8]},
    "report": False,
}

Numbers = dict[str, Any]


def statistics(tensors: Mapping[str, Tensor]) -> Numbers:
    """Numbers that differ if any tensor, or the order of its entries, differs by more than rounding."""
    total, position = 0.0, 0.0
    for number, tensor in enumerate(tensors.values(), 1):
        values = tensor.detach().double().flatten()
        total += float(values.square().sum())
        position += float(values @ torch.linspace(-1, 1, len(values), dtype=torch.float64).add(1 / number))
    names = hashlib.sha256("\n".join(tensors).encode()).hexdigest()
    return {"tensors": len(tensors), "names": names, "norm": total**0.5, "position": position}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and bits."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def processor() -> str:
    """What decides the last bits: the kernels that torch chooses."""
    return torch.backends.cpu.get_cpu_capability()


def initial_weights(name: str) -> dict[str, Tensor]:
    """The seeded weights of a named network."""
    torch.manual_seed(0)
    return create_model(name).state_dict()


def train_quietly(folder: Path, resume: str | None = None, **settings: Any) -> dict[str, Tensor]:
    """Train and return the weights that the run keeps."""
    with contextlib.redirect_stdout(io.StringIO()):
        train(configure(**{**_SETTINGS, **settings}), folder, resume=resume)
    return load_file(folder / "model.safetensors")


def resume_old_run(folder: Path) -> dict[str, Tensor]:
    """A copy of the old run, resumed to its end."""
    shutil.copytree(OLD_RUN, folder)
    return train_quietly(folder, resume="auto")


def files(folder: Path) -> list[str]:
    """What a run leaves in its directory, but for hidden files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def result_schema(folder: Path) -> Any:
    """Keys and types of ``result.json``; the commit is known in a repository only."""
    return schema({**json.loads((folder / "result.json").read_text()), "commit": ""})


def metrics_schema(folder: Path) -> Any:
    """Keys and types of the lines of ``metrics.jsonl``."""
    return schema([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def json_commands(folder: Path) -> dict[str, list[str]]:
    """The commands that print JSON, as they are frozen; `folder` is a finished run."""
    return {
        "models": ["models", "--json"],
        "models NAME": ["models", "hamiltonian-digits", "--batch-size", "2", "--json"],
        "eval": ["eval", str(folder), "--threads", "1", "--json"],
        "analyze": ["analyze", str(folder), "--num-images", "2", "--threads", "1", "--json"],
    }


def output_of(command: list[str]) -> str:
    """What a command prints."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main(command)
    return printed.getvalue()


def schema(value: Any) -> Any:
    """The keys and types of a JSON value; the items of a list are described together."""
    if isinstance(value, dict):
        return {key: schema(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        kinds = {json.dumps(schema(item), sort_keys=True) for item in value}
        return [json.loads(kind) for kind in sorted(kinds)]
    if value is None or isinstance(value, bool | str):
        return type(value).__name__
    return "number"


def measure(folder: Path) -> tuple[Numbers, dict[str, str]]:
    """Everything that is frozen, and the digests; runs are trained in `folder`."""
    initial = {name: initial_weights(name) for name in list_models()}
    trained = train_quietly(folder / "trained")
    resumed = resume_old_run(folder / "resumed")
    run = folder / "trained"
    behaviour = {
        "processor": processor(),
        "initial weights": {name: statistics(weights) for name, weights in initial.items()},
        "parameters": {name: num_parameters(name) for name in initial},
        "trained weights": statistics(trained),
        "resumed weights": statistics(resumed),
        "files": files(run),
        "json": {name: schema(json.loads(output_of(words))) for name, words in json_commands(run).items()},
        "result.json": result_schema(run),
        "metrics.jsonl": metrics_schema(run),
    }
    exact = {f"initial {name}": digest(weights) for name, weights in initial.items()}
    exact |= {"trained": digest(trained), "resumed": digest(resumed)}
    exact |= {"metrics.jsonl": (run / "metrics.jsonl").read_text()}
    for words in ([], *([name] for name in COMMANDS), ["data", "get"], ["data", "check"]):
        exact[" ".join(["help", *words])] = output_of([*words, "--help"])
    return behaviour, exact


def num_parameters(name: str) -> int:
    """The parameters of a named network."""
    return sum(parameter.numel() for parameter in create_model(name).parameters())


class _StopAt:
    """A monitor that has the run stop, saved and resumable."""

    def on_step(self, model: Any, step: int) -> dict[str, float]:
        if step == NUM_STEPS // 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}


def write_old_run() -> None:
    """Train the smallest network half way, with averaged weights and held-out images, and keep its directory."""
    shutil.rmtree(OLD_RUN, ignore_errors=True)
    with contextlib.suppress(Interrupted):
        train(configure(**_SMALL, monitor_every=1), OLD_RUN, monitors=[_StopAt()])
    for name in (".lock", "previous.ckpt"):
        (OLD_RUN / name).unlink(missing_ok=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--run" in sys.argv:
        write_old_run()
    with tempfile.TemporaryDirectory() as place:
        found, exactly = measure(Path(place))
    if "--exact" in sys.argv:
        Path(sys.argv[sys.argv.index("--exact") + 1]).write_text(json.dumps(exactly, indent=1) + "\n")
    else:
        BEHAVIOUR.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
