"""The job with Muon: resumed bit for bit, by Muon alone."""

from __future__ import annotations

import pytest

from tests.flags import SYNTHETIC
from tests.job import LLAMA, assert_resumes, run_job

WORDS = [*LLAMA, *SYNTHETIC, "--sharding_strategy", "full_shard", "--lr", 1e-2, "--lr_decay_iters", 9]
MUON = ["--optimizer", "muon"]


@pytest.mark.full
def test_a_job_resumes_bit_for_bit_and_with_its_optimizer_alone(tmp_path):
    runs = {"muon": assert_resumes(tmp_path, *WORDS, *MUON, at=3, steps=6)}
    runs["adamw"] = tmp_path / "adamw"
    run_job(*WORDS, "--max_steps", 2, "--output_dir", runs["adamw"], world_size=2).succeeded()
    for saved, flags, said in (
        ("muon", [], "--optimizer muon and the job has AdamW: give --optimizer muon, or"),
        ("adamw", MUON, "AdamW and the job has --optimizer muon: give --optimizer adamw, or"),
    ):
        resume = ["--output_dir", runs[saved], "--max_steps", 8, "--resume_from_checkpoint", "latest"]
        refused = run_job(*WORDS, *flags, *resume, world_size=2)
        assert refused.statuses == [2, 2] and f"was made with the optimizer {said}" in refused.output, refused.output
