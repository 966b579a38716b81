"""A run's network as an ONNX file, checked against torch before it is handed over."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path

import torch

from revode import data
from revode.files import write_atomically
from revode.training.run import load_run

TOLERANCE = 1e-4
"""Largest difference of class scores, relative to the largest score, that counts as the same network."""


def export_onnx(folder: str | Path, path: str | Path, *, overwrite: bool = False) -> tuple[Path, float | None]:
    """Write the network of a run as ONNX, for any batch size.

    Args:
        folder: The run.
        path: The file to write.
        overwrite: Whether an existing file may be replaced.

    Returns:
        The path, and the largest relative difference of its scores to torch's; None where onnxruntime is not installed.
    """
    path = Path(path)
    run = load_run(folder)
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give the file to write, as {path / 'model.onnx'}")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; give another path or --overwrite")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a directory; create it or give another path")
    info = data.describe(run.config.data.dataset)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, info.channels, info.image_size, info.image_size, generator=generator)
    content = _convert(run.model, images)
    difference = _compare(content, run.model, images)
    if difference is not None and difference > TOLERANCE:
        raise ValueError(f"the ONNX network differs from torch's by {difference:.2g} in its scores; it was not written")
    write_atomically(path, content)
    return path, difference


def _convert(model: torch.nn.Module, images: torch.Tensor) -> bytes:
    # The exporter talks about its own progress and deprecations; errors are raised all the same.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (images,),
            dynamo=True,
            input_names=["images"],
            output_names=["scores"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    assert program is not None
    return program.model_proto.SerializeToString()


@torch.no_grad()
def _compare(content: bytes, model: torch.nn.Module, images: torch.Tensor) -> float | None:
    """The largest difference of class scores, on the batch and on a single image of it."""
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    worst = 0.0
    for batch in (images, images[:1]):
        expected = model(batch)
        scores = torch.from_numpy(session.run(None, {"images": batch.numpy()})[0])
        worst = max(worst, float((scores - expected).abs().max() / expected.abs().max()))
    return worst
