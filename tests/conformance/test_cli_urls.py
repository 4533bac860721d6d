"""The ``smp`` command on object stores, and models and data there: a real S3 server, nothing kept on this machine."""

from __future__ import annotations

import gzip
import json
import re
import threading

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401  imported before the ranks are forked

import smp.cli
from smp.checkpoint.remote import ASIDE
from tests.clock import wait_until
from tests.conformance.test_cli import call, run_dir  # noqa: F401  fixtures
from tests.job import LLAMA, losses, run_job
from tests.s3 import Fault, nth, proxy, s3, s3_port  # noqa: F401  fixtures


@pytest.fixture
def url(run_dir, s3):  # noqa: F811
    """The run's checkpoints in a bucket of this test's own, and one whose upload was interrupted."""
    for name in ("llama_v2-2steps", "llama_v2-4steps"):
        s3.put_folder(f"run/{name}", run_dir / "checkpoints" / name)
    s3.put("run/llama_v2-6steps/rank00000-000.safetensors", b"half")
    return f"{s3.url}/run"


def tensor_file(s3, step: int) -> str:  # noqa: F811
    return next(key for key in s3.keys(f"run/llama_v2-{step}steps") if key.endswith(".safetensors"))


def test_all_checkpoints_below_a_url_are_verified_without_copies(call, url, s3, proxy, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    status, out, err = call("verify", url)
    assert (status, err) == (0, [])
    assert out[0].startswith("llama_v2-2steps: valid (") and out[1].startswith("llama_v2-4steps: valid (")
    assert out[2:] == ["llama_v2-6steps: left by an interrupted save, and removed by the next upload"]
    assert list(tmp_path.iterdir()) == []
    read = [r.key for r in proxy.requests if r.kind == "get"]
    assert len(read) == len(set(read)), "a file is read once"
    assert call("verify", s3.url)[1][0].startswith("run/llama_v2-2steps: valid (")


def test_quick_reads_no_tensors(call, url, proxy):  # noqa: F811
    status, out, _ = call("verify", "--quick", f"{url}/llama_v2-4steps")
    assert status == 0 and out[0].startswith("llama_v2-4steps: complete (")
    assert [r.key for r in proxy.requests if r.kind == "get" and not r.key.endswith("manifest.json")] == []


def test_a_bucket_may_be_a_checkpoint_itself(call, run_dir, s3):  # noqa: F811
    for file in (run_dir / "checkpoints" / "llama_v2-4steps").iterdir():
        s3.put(file.name, file.read_bytes())
    status, out, err = call("verify", s3.url)
    assert (status, err) == (0, []) and ": valid (" in out[0], out


@pytest.mark.parametrize("how", ["bit", "gone", "added", "manifest"])
def test_damage_is_named_by_file(call, url, s3, how):  # noqa: F811
    key = tensor_file(s3, 4)
    name, data = key.rpartition("/")[2], bytearray(s3.get(key))
    folder = "run/llama_v2-4steps"
    if how == "bit":
        data[-5] ^= 64
        s3.put(key, bytes(data))
        words = f"  {name} is not as it was written (its digest differs)"
    elif how == "gone":
        s3.remove(key)
        words = f"  {name} is missing"
    elif how == "added":
        s3.put(f"{folder}/other.bin", b"x")
        words = "  other.bin does not belong to it"
    else:
        content = s3.get(f"{folder}/manifest.json")
        s3.put(f"{folder}/manifest.json", content.replace(b'"step":4', b'"step":5'))
        words = "  manifest.json does not match its own checksum"
    status, out, _ = call("verify", url)
    assert status == 1 and out[1:3] == ["llama_v2-4steps: damaged", words], out
    assert out[-1] == "1 of 2 checkpoints cannot be resumed from"


def test_a_checkpoint_of_an_older_branch_is_told_from_an_interrupted_upload(call, url, s3):  # noqa: F811
    s3.put(f"run/llama_v2-6steps/{ASIDE}", b"{}")
    assert (
        call("verify", url)[1][2] == "llama_v2-6steps: set aside, as the run continued without it; no resume takes it"
    )


def test_what_is_not_there_or_does_not_answer(call, url, s3, proxy):  # noqa: F811
    status, _, err = call("verify", f"{s3.url}/nowhere")
    assert status == 2 and err[0].startswith(f"error: {s3.url}/nowhere does not exist: give the URL")
    status, _, err = call("verify", f"{url}/llama_v2-6steps")
    assert status == 1 and err == []
    s3.put("other/file", b"1")
    assert call("inspect", f"{s3.url}/other")[0] == 2
    assert call("verify", "nosuch://bucket")[0] == 2
    proxy.away = True
    status, _, err = call("verify", url)
    assert status == 1 and len(err) == 1 and err[0].startswith(f"error: {url} cannot be listed ("), err


def test_inspect(call, url, run_dir, proxy):  # noqa: F811
    status, out, _ = call("inspect", url)
    assert status == 0 and [line.split()[0] for line in out[1:]] == ["llama_v2-2steps", "llama_v2-4steps"]
    local = json.loads("\n".join(call("inspect", "--json", run_dir / "checkpoints" / "llama_v2-4steps")[1]))
    there = json.loads("\n".join(call("inspect", "--json", f"{url}/llama_v2-4steps")[1]))
    assert there.pop("path") == f"{url}/llama_v2-4steps" and local.pop("path") and there == local
    assert {r.key.rpartition("/")[2] for r in proxy.requests if r.kind == "get"} == {"manifest.json"}


def test_diff(call, url, run_dir):  # noqa: F811
    local = run_dir / "checkpoints" / "llama_v2-4steps"
    assert call("diff", "--values", f"{url}/llama_v2-4steps", local)[0] == 0
    assert call("diff", f"{url}/llama_v2-2steps", local)[0] == 1


def test_export_reads_the_models_tensors_by_range(call, url, run_dir, proxy, tmp_path):  # noqa: F811
    status, out, err = call("export", f"{url}/llama_v2-4steps", tmp_path / "out", "--verify", "size")
    assert (status, err) == (0, []) and out[0].startswith("Exported step 4 of llama_v2-4steps to ")
    ours, theirs = load_file(tmp_path / "out/model.safetensors"), load_file(run_dir / "final/model.safetensors")
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items()) and ours.keys() == theirs.keys()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    status, _, err = call("export", url, tmp_path / "other")
    assert status == 2 and err[-1].startswith(f"error: {url} contains 2 checkpoint(s): give one of them, such as")


def test_export_to_a_url_ends_with_its_config(call, url, s3, proxy, tmp_path):  # noqa: F811
    status, out, err = call("export", f"{url}/llama_v2-4steps", f"{s3.url}/model")
    assert (status, err) == (0, []) and f"to {s3.url}/model: 1 file(s)" in out[0]
    wait_until(lambda: proxy.answered("put")[-1] == "model/config.json")  # noted when it has been handed over
    assert {"model/config.json", "model/model.safetensors", "model/smp_export.json"} <= set(s3.keys("model"))
    assert call("export", f"{url}/llama_v2-2steps", f"{s3.url}/model")[0] == 0, "an earlier export is replaced"
    s3.put("model/mine.txt", b"1")
    status, _, err = call("export", f"{url}/llama_v2-2steps", f"{s3.url}/model")
    assert status == 2 and "contains mine.txt, which no earlier export wrote" in err[0]


# ------------------------------------------------------------------------------------------------------------- the job


def test_a_job_reads_its_data_from_a_store_and_writes_its_model_to_one(s3, proxy, tmp_path):  # noqa: F811
    rows = [json.dumps({"input_ids": [(7 * row + i) % 64 for i in range(16)]}) for row in range(32)]
    text = "\n".join(rows).encode()
    s3.put("data/a.jsonl.gz", gzip.compress(text))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl.gz").write_bytes(gzip.compress(text))
    words = [*LLAMA, "--max_steps", 3, "--save_final_model", 1, "--data_cache_dir", tmp_path / "cache"]
    there = run_job(
        *words, "--training_dir", f"{s3.url}/data", "--model_dir", f"{s3.url}/model", "--output_dir", tmp_path / "run",
        world_size=2,
    ).succeeded()  # fmt: skip
    run_job(*words, "--training_dir", tmp_path / "data", "--output_dir", tmp_path / "other", world_size=2).succeeded()
    assert losses(tmp_path / "run") == losses(tmp_path / "other")
    assert f"It was uploaded to {s3.url}/model." in there.output
    wait_until(lambda: proxy.answered("put")[-1] == "model/config.json")  # noted when it has been handed over
    for file in (tmp_path / "other" / "final").iterdir():
        assert s3.get(f"model/{file.name}") == file.read_bytes(), file.name


def test_a_model_that_cannot_be_uploaded_is_kept(s3, proxy, tmp_path):  # noqa: F811
    proxy.rules = [lambda r: Fault(status=403) if r.key == "model/model.safetensors" else None]
    words = [*LLAMA, "--use_synthetic_data", 1, "--max_steps", 1, "--save_final_model", 1]
    run = tmp_path / "run"
    ended = run_job(*words, "--model_dir", f"{s3.url}/model", "--output_dir", run, world_size=2)
    assert set(ended.statuses) == {1}
    assert f"the final model could not be uploaded: {s3.url}/model/model.safetensors cannot be written" in ended.output
    assert f"It is in {run}/final: copy it from there" in ended.output
    assert (run / "final" / "config.json").exists()
    assert "model/config.json" not in s3.keys("model")


def test_a_bucket_that_does_not_exist_is_said_before_the_first_step(s3, tmp_path):  # noqa: F811
    words = ["--use_synthetic_data", 1, "--max_steps", 1, "--checkpoint_dir", "s3://nobucket/run"]
    ended = run_job(*LLAMA, *words, "--output_dir", tmp_path / "run")
    assert ended.statuses == [2] and "Traceback" not in ended.output and not (tmp_path / "run").exists(), ended.output
    assert re.search(r"s3://nobucket/run/.* bucket does not exist", ended.output), ended.output


def test_a_model_that_is_killed_in_its_upload_is_no_model(call, url, s3, proxy):  # noqa: F811
    """Every order of what has got there: without config.json nobody loads it, and the next export replaces it."""
    held = Fault(cut="middle", hold=threading.Event())
    proxy.rules = [nth(0, lambda r: r.key == "model/config.json" and r.method == "PUT", held)]
    thread = threading.Thread(
        target=smp.cli.main, args=(["export", f"{url}/llama_v2-4steps", f"{s3.url}/model"],), daemon=True
    )
    thread.start()
    held.reached.wait(300)
    assert "model/model.safetensors" in s3.keys("model") and "model/config.json" not in s3.keys("model")
    held.hold.set()  # and tried again
    thread.join()
    assert "model/config.json" in s3.keys("model")


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["--output_dir", "s3://bucket/run"],
            "--output_dir s3://bucket/run is a URL, and metrics and logs are written",
        ),
        (["--model_dir", "s3://bucket1/none", "--save_final_model", 1], None),
        (["--model_dir", "nosuch://x/y", "--save_final_model", 1], "nosuch"),
    ],
)
def test_what_a_job_refuses(tmp_path, s3, proxy, monkeypatch, words, said):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    proxy.away = True
    ended = run_job(*LLAMA, "--use_synthetic_data", 1, "--max_steps", 1, *words)
    assert ended.statuses == [2] and "Traceback" not in ended.output
    assert (said or "error: no model can be written to s3://bucket1/none: ") in ended.output, ended.output
    assert [path for path in tmp_path.rglob("*") if "s3:" in path.name] == []
