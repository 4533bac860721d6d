"""A job with bf16 parameters: a resume is bit-identical, of its own kind alone, and its model is in bf16."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.job import LLAMA, assert_resumes, run_job, tensors

JOB = (
    *LLAMA, "--use_synthetic_data", 1, "--bf16", 1, "--global_batch_size", 8, "--train_batch_size", 2,
    "--checkpoint_freq", 2, "--lr", 0.01, "--lr_decay_iters", 6,
)  # fmt: skip
BF16 = ("--param_dtype", "bf16")


@pytest.mark.full
def test_a_run_with_bf16_parameters_is_resumed_bit_for_bit_and_by_its_own_kind_alone(tmp_path):
    parts = assert_resumes(tmp_path, *JOB, *BF16, "--save_final_model", 1, at=2, steps=4)
    found = {name.partition("/")[2]: tensor for name, tensor in tensors(parts, 4).items()}
    kinds = {name.partition(".")[0] for name, tensor in found.items() if tensor.dtype == torch.bfloat16}
    assert kinds == {"model", "optim"}
    final = load_file(parts / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in final.values()} == {torch.bfloat16}
    assert json.loads((parts / "final" / "config.json").read_text())["dtype"] == "bfloat16"
    resume = ("--resume_from_checkpoint", "latest", "--output_dir", parts, "--max_steps", 6)
    outcome = run_job(*JOB, "--optimizer_state_dtype", "bf16", *resume)
    assert outcome.statuses == [2] and "Traceback" not in outcome.output
    assert "was made with the optimizer --optimizer_state_dtype bf16 --param_dtype bf16" in outcome.output
    evaluate = (*JOB, "--evaluate_only", 1, "--output_dir", parts, "--resume_from_checkpoint", "latest")
    outcome = run_job(*evaluate)
    assert outcome.statuses == [2] and "has its parameters in bf16: give --param_dtype bf16" in outcome.output
    run_job(*evaluate, *BF16).succeeded()
    outcome = run_job(*JOB, *BF16, "--bf16", 0, "--output_dir", tmp_path / "fp32")
    assert outcome.statuses == [2] and "--param_dtype bf16 needs --bf16 1" in outcome.output


@pytest.mark.full
@pytest.mark.parametrize("flags", ["--tensor_parallel_degree 2", "--context_parallel_degree 2", "--cpu_offload 1"])
def test_a_run_goes_on_at_another_layout(flags, tmp_path):
    words = (*JOB, *BF16, "--output_dir", tmp_path / "run")
    run_job(*words, "--max_steps", 2, world_size=2).succeeded()
    more = ("--max_steps", 4, "--resume_from_checkpoint", "latest")
    run_job(*words, *more, *flags.split(), world_size=2).succeeded()
