"""Bad input of a command is one sentence with the way out, and is refused before any work is done."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import revode
from revode_lab.cli import COMMANDS, build_parser, main

SOURCE = Path(revode.__file__).parent


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "Traceback" not in printed.err
    assert printed.err.count("\n") == 1
    return printed.err


class TestBeforeAnyWork:
    @pytest.mark.parametrize("given", [("nope",), ("resnet-8", "--exact", "14"), ("resnet-8", "--options", "h=0.1")])
    def test_a_wrong_network_is_not_told_to_fetch_data(self, given, tmp_path, capsys) -> None:
        line = refused(capsys, "train", *given, "--dataset", "cifar10", "--data-root", str(tmp_path))
        assert "unknown network 'nope'" in line or "unknown option" in line

    @pytest.mark.parametrize(
        "command",
        [
            ("analyze", "hamiltonian-digits"),
            ("reproduce", "memory"),
        ],
    )
    def test_results_cannot_go_into_a_file(self, command, tmp_path, capsys) -> None:
        (tmp_path / "file").touch()
        for out in (tmp_path / "file", tmp_path / "file" / "below"):
            assert "is a file; give a directory" in refused(capsys, *command, "--out", str(out))
        assert "/proc cannot be written" in refused(capsys, *command, "--out", "/proc/results")

    def test_a_second_network_that_cannot_be_analyzed(self, capsys) -> None:
        line = refused(capsys, "analyze", "hamiltonian-digits", "--against", "gpt-mini", "--json")
        assert "gpt-mini" in line


@pytest.mark.parametrize("command", [("train",), ("analyze", "hamiltonian-digits"), ("reproduce", "memory")])
def test_more_threads_than_any_machine_has(command, capsys) -> None:
    assert "100000; expected" in refused(capsys, *command, "--threads", "100000")


@pytest.mark.parametrize(
    "command",
    [
        ("train",),
        ("train", "--print-config"),
        ("eval", "nowhere"),
        ("report", "nowhere"),
        ("export", "nowhere", "--onnx"),
        ("analyze", "hamiltonian-digits", "--json"),
        ("reproduce", "memory"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_extra(command, monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = refused(capsys, *command)
    assert "not installed: " in line
    assert "run: pip install 'revode[lab]' (in a clone: pip install '.[lab]')" in line


def test_a_seed_out_of_range(capsys) -> None:
    assert "less than 2^63" in refused(capsys, "analyze", "hamiltonian-digits", "--seed", str(2**70))


def test_export_names_what_is_wrong(tmp_path, capsys) -> None:
    assert "nowhere" in refused(capsys, "export", str(tmp_path / "nowhere"), "--onnx")


def test_places_for_runs_that_cannot_be_written_are_named(tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["reproduce", "memory", "--runs", str(tmp_path / "file")]) == 2
    assert f"cannot write to {tmp_path / 'file'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("processes", "expected"), [("99", "--processes is 99; expected 1 to "), ("3", "give a divisor of 16")]
)
def test_processes_that_cannot_share_the_work_are_refused_once(
    processes, expected, monkeypatch, tmp_path, capsys
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    given = ("--processes", processes, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    assert expected in refused(capsys, "reproduce", "table-1", *given)
    assert list(tmp_path.iterdir()) == []


class TestFlags:
    """Errors name flags, and only those that the command has."""

    @pytest.mark.parametrize("command", COMMANDS)
    def test_an_unknown_flag_names_the_nearest(self, command, capsys) -> None:
        parser = build_parser(command)[1][command]
        known, words = parser.flags()[-1], ["name"] if any(not a.option_strings for a in parser._actions) else []
        needed = {"data": ["get", "digits"], "export": ["run", "--onnx"]}.get(command, words)
        with pytest.raises(SystemExit) as stopped:
            main([command, *needed, f"{known}x"])
        line = capsys.readouterr().err
        assert stopped.value.code == 2
        assert line.count("\n") == 1
        assert known in line.partition("nearest:")[2]

    def test_no_sentence_names_an_option_that_its_command_lacks(self) -> None:
        """Code that several commands use calls a flag with its command (`revode train --overwrite`), or by no name."""
        shared = "networks stability engine system.py charts.py page.py training/run.py training/checkpoint.py".split()
        # What these say, only commands with the flag can hear.
        of_one_command = ("check_vacant", "find_source", "_check_given", "export_onnx", "use_threads", "check_folder")
        for path in sorted(SOURCE.rglob("*.py")):
            if not str(path.relative_to(SOURCE)).startswith(tuple(shared)):
                continue
            for function in ast.walk(ast.parse(path.read_text())):
                if not isinstance(function, ast.FunctionDef) or function.name in of_one_command:
                    continue
                for node in ast.walk(function):
                    if isinstance(node, ast.Raise):
                        text = ast.unparse(node)
                        assert not re.search(r"(?<!revode train )--[a-z]", text), (path, function.name, text)


def test_a_measurement_that_is_terminated_leaves_a_page_of_what_is_finished(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "revode_lab.cli", "reproduce", "memory", "--threads", "1"]
    command += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        while len(list((tmp_path / "runs").glob("*/result.json"))) < 2 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=240)
    assert process.returncode == 143
    assert "stopped; the same command goes on" in printed
    assert "Incomplete: " in (tmp_path / "out" / "memory.md").read_text()
