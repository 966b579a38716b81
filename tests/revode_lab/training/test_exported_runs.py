"""A run's network as ONNX gives torch's scores."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny_runs import command, tiny

from revode_lab.training import load_run, train
from revode_lab.training.run import export_onnx


def test_onnx_gives_the_scores_of_torch(tmp_path, capsys):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    train(tiny(max_steps=2), tmp_path / "run")
    capsys.readouterr()
    path = tmp_path / "net.onnx"
    code, out, err = command("export", tmp_path / "run", "--onnx", path, capsys=capsys)
    assert code == 0, err
    assert out.splitlines()[0] == str(path)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = torch.randn(3, 1, 8, 8)
    with torch.no_grad(), warnings.catch_warnings():
        expected = load_run(tmp_path / "run").model(images)
    scores = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    code, _, err = command("export", tmp_path / "run", "--onnx", path, capsys=capsys)
    assert code == 2
    assert "exists already" in err


def test_of_a_run_cut_before_its_last_level_it_takes_the_images_of_that_level(tmp_path):
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    train(tiny(levels="18@4:1,18@8:1", epochs=2, max_steps=2), tmp_path / "run")
    path, _ = export_onnx(tmp_path / "run", tmp_path / "net.onnx")
    shape = onnx.load(path).graph.input[0].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim[1:]] == [1, 4, 4]
