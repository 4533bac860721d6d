"""Jobs in fp8: the loss of the demo, resumes with and without it, and files that are as without."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.flags import ROOT
from tests.job import LLAMA, losses, run_job

pytest.importorskip("torchao")
JOB = [*LLAMA, "--hidden_width", 64, "--use_synthetic_data", 1, "--global_batch_size", 4, "--lr_decay_iters", 8]


def run(folder, name, *words, steps=4, **kinds):
    job = [*JOB, "--output_dir", folder / name, "--max_steps", steps, *words]
    return run_job(*job, **kinds).succeeded()


@pytest.mark.full
def test_a_run_goes_on_with_fp8_and_without_and_at_any_layout(tmp_path):
    run(tmp_path, "plain", "--checkpoint_freq", 2, "--save_final_model", 1)
    run(tmp_path, "fp8", "--checkpoint_freq", 2, "--save_final_model", 1, "--fp8", 1)
    plain, in_fp8 = losses(tmp_path / "plain"), losses(tmp_path / "fp8")
    assert plain != in_fp8 and plain == pytest.approx(in_fp8, rel=2e-3)
    theirs, mine = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("plain", "fp8"))
    assert theirs.keys() == mine.keys() and all(theirs[key].dtype == mine[key].dtype for key in mine)

    def resumed(of, name, *words, **kinds):
        (checkpoint,) = (tmp_path / of / "checkpoints").glob("*-2steps")
        found = run(tmp_path, name, "--resume_from_checkpoint", checkpoint, *words, **kinds)
        return losses(tmp_path / name), found.output

    again, said = resumed("fp8", "again", "--fp8", 1)
    assert again == in_fp8[2:] and "Changed since" not in said
    on, said = resumed("plain", "on", "--fp8", 1)
    assert "Changed since the checkpoint: fp8 False -> True" in said and on != plain[2:]
    assert on == pytest.approx(plain[2:], rel=2e-3)
    off, said = resumed("fp8", "off")
    assert "Changed since the checkpoint: fp8 True -> False" in said and off == pytest.approx(in_fp8[2:], rel=2e-3)
    # A last bit of a sum may round a value to the next one of fp8, of which a step is a sixteenth.
    for name, words in (("tp", ["--tensor_parallel_degree", 2]), ("shard", [])):
        other, _ = resumed("fp8", name, "--fp8", 1, *words, world_size=2)
        assert other == pytest.approx(in_fp8[2:], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_the_demo_trains_to_the_loss_of_fp32(recipe, tmp_path):
    found = {}
    for name, words in (("fp32", []), (recipe, ["--fp8", 1, "--fp8_recipe", recipe])):
        demo = ["--config", ROOT / "configs" / "demo.yaml", "--output_dir", tmp_path / name, "--save_final_model", 0]
        files = {"training_dir": "train.txt", "test_dir": "validation.txt", "tokenizer_name_or_dir": "tokenizer"}
        data = [w for flag, file in files.items() for w in (f"--{flag}", ROOT / "data" / "sample" / file)]
        run_job(*demo, *data, "--data_cache_dir", tmp_path / "cache", *words, world_size=2).succeeded()
        found[name] = losses(tmp_path / name)[-5:]
    assert sum(found[recipe]) == pytest.approx(sum(found["fp32"]), rel=1e-2)
