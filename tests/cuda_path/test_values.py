"""The job's numbers on a device of type ``cuda``, whose tensors hold the host's memory, against those on the CPU."""

import pathlib
import subprocess
import sys

import pytest

from tests.cuda_path.reports import ROOT, shim
from tests.job import read_metrics, run_job

pytestmark = pytest.mark.full

JOB = (
    *("--model_type", "llama_v2", "--hidden_width", "64", "--num_layers", "4", "--num_heads", "4"),
    *("--vocab_size", "128", "--max_context_width", "32", "--max_steps", "4", "--use_synthetic_data", "1"),
    *("--checkpoint_freq", "2", "--save_final_model", "0", "--bf16", "0"),
)  # fmt: skip
FUSED = "--attn_implementation fused"
DOCUMENTS = "--document_mask 1 --tokenizer_name_or_dir data/sample/tokenizer"


def curve(folder: pathlib.Path) -> list[tuple[float, float]]:
    """The losses and gradient norms of a run."""
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor_parallel_degree 2",
        *(
            pytest.param(flags, marks=pytest.mark.slow)  # more than a minute of a core each
            for flags in (
                "--activation_checkpointing_mode selective --gradient_accumulation_steps 2",
                "--gradient_accumulation_steps 2 --reshard_between_microbatches 0",
                "--offload_activations 1 --activation_loading_horizon 1",
                "--cpu_offload 1",
                f"--context_parallel_degree 2 --cp_comm_type p2p {DOCUMENTS}",
                "--context_parallel_degree 2 --cp_comm_type all_gather --gradient_accumulation_steps 2",
                "--context_parallel_degree 2 --cp_comm_type all_to_all --activation_checkpointing_mode selective",
                f"--checkpoint_type async_sharded {DOCUMENTS}",
                f"{FUSED} {DOCUMENTS}",
            )
        ),
    ],
)
def test_values_are_those_of_the_cpu(flags, tmp_path):
    words = [*JOB, *flags.split(), "--output_dir", str(tmp_path / "gpu"), "--watchdog_timeout", "60"]
    job = [sys.executable, "-m", "tests.cuda_path.host_job", str(shim()), "2", *words]
    done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    on_gpu = curve(tmp_path / "gpu")
    # A CPU offloads to a disk alone, and has no fused kernels; the numbers are those without.
    plain = "" if "offload_activations" in flags else flags.removeprefix(FUSED)
    run_job(*JOB, *plain.split(), "--output_dir", tmp_path / "cpu", world_size=2).succeeded()
    on_cpu = curve(tmp_path / "cpu")
    for (loss, norm), (expected, expected_norm) in zip(on_gpu, on_cpu, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert on_gpu[0] != on_gpu[-1]
    saved = sorted(path.name for path in (tmp_path / "gpu" / "checkpoints").iterdir())
    assert [name for name in saved if name.endswith("steps")] == ["llama_v2-2steps", "llama_v2-4steps"]
