"""A job with an axis of one line: see ``tests/unit/test_axes.py``."""

from __future__ import annotations

import json

from tests.flags import SYNTHETIC
from tests.job import LLAMA, run_job
from tests.unit.test_axes import EP, listed


def test_its_log_and_its_manifest_have_it(tmp_path):
    def prepare(rank: int) -> None:
        listed().__enter__()

    words = [*LLAMA, *SYNTHETIC, "--max_steps", 1, "--sharding_strategy", "full_shard", f"--{EP.flag}", 2]
    outcome = run_job(*words, "--output_dir", tmp_path, world_size=2, prepare=prepare).succeeded()
    assert "dp_replicate 1 x dp_shard 2 (ep 2 inside) x tp 1" in outcome.output
    (manifest,) = tmp_path.glob("checkpoints/*-1steps/manifest.json")
    assert json.loads(manifest.read_text())["degrees"]["ep"] == 2
