"""Names that keep their place: what users' scripts import, from a checkout and from the package."""

import subprocess
import sys

import pytest

import arguments
import train_lib
from smp.train import __main__ as train_main
from smp.train import arguments as settings
from tests.conformance.test_package import ROOT


def test_a_checkouts_own_names():
    assert train_lib.main is train_main.main
    assert arguments.TrainConfig is settings.TrainConfig and arguments.parse_args is settings.parse_args


@pytest.mark.parametrize("command", [["train_lib.py"], ["-m", "smp.train"], ["-m", "data.prepare"]])
@pytest.mark.full
def test_commands_of_a_checkout(command):
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr
