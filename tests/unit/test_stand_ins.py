"""SMP v2's small helpers do what AWS's scripts call them for."""

from __future__ import annotations

import functools
import logging
import pathlib
import time

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from smp.compat import stand_ins
from smp.errors import UserError
from tests.s3 import proxy, s3, s3_port  # noqa: F401  fixtures

STEPS = r"^.*\d+steps$"


def folders(path: pathlib.Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_the_last_folders_by_their_last_number_are_kept(tmp_path, caplog):
    for name in ("llama_v2-5steps", "llama_v2-40steps", "llama_v2-100steps", "model", "tp2-0", "old-9steps.aside"):
        (tmp_path / name / "inner-1steps").mkdir(parents=True)
    (tmp_path / "file-1steps").write_text("")
    (tmp_path / "link-2steps").symlink_to(tmp_path / "model")
    before = folders(tmp_path)
    arguments = {"sort_fn": stand_ins.last_int, "regex": STEPS}
    stand_ins.limit_num_subdirs(str(tmp_path), 2, **arguments, log=False)  # another rank
    stand_ins.limit_num_subdirs(str(tmp_path), 3, **arguments, log=True)
    assert folders(tmp_path) == before
    caplog.set_level(logging.INFO)
    stand_ins.limit_num_subdirs(str(tmp_path), 2, **arguments, log=True)
    assert before - folders(tmp_path) == {"llama_v2-5steps"}
    assert f"Deleted llama_v2-5steps in {tmp_path}" in caplog.text
    assert (tmp_path / "model" / "inner-1steps").exists()
    with pytest.raises(UserError, match="0 would delete what was just saved: give at least 1"):
        stand_ins.limit_num_subdirs(str(tmp_path), 0, **arguments)
    stand_ins.limit_num_subdirs(str(tmp_path / "nothing"), 2, **arguments)


@pytest.mark.parametrize("folder", ["llama_v2-5steps", "llama_v2-5steps/tp2-0"])  # AWS's with tensor parallelism
def test_a_folder_that_is_itself_a_checkpoint_keeps_its_content(tmp_path, caplog, folder):
    inner = tmp_path / folder
    (inner / "part").mkdir(parents=True)
    (tmp_path / "llama_v2-4steps").mkdir()
    stand_ins.limit_num_subdirs(str(inner), 1, sort_fn=stand_ins.last_int, regex=STEPS, log=True)
    assert folders(inner) == {"part"} and folders(tmp_path) == {"llama_v2-4steps", "llama_v2-5steps"}
    assert f"so none is deleted: give {tmp_path}, the folder around them" in caplog.text
    caplog.clear()
    (tmp_path / "model").mkdir()
    stand_ins.limit_num_subdirs(str(tmp_path / "model"), 1, sort_fn=stand_ins.last_int, regex=STEPS, log=True)
    assert not caplog.records  # of the final model
    stand_ins.limit_num_subdirs(str(tmp_path), 1, sort_fn=stand_ins.last_int, regex=STEPS, log=True)
    assert folders(tmp_path) == {"llama_v2-5steps", "model"}


def test_what_cannot_be_deleted_is_said(tmp_path, caplog, monkeypatch):
    for step in (1, 2):
        (tmp_path / f"{step}steps").mkdir()

    def refuse(path):
        raise PermissionError("not yours")

    monkeypatch.setattr(stand_ins.shutil, "rmtree", refuse)
    stand_ins.limit_num_subdirs(tmp_path, 1, regex=STEPS)
    assert "1steps in " in caplog.text and "could not be deleted: not yours" in caplog.text


def test_names_are_sorted_by_their_last_number():
    assert sorted(["b2-10steps", "a-9steps", "none", "c-100"], key=stand_ins.last_int) == [
        "none", "a-9steps", "b2-10steps", "c-100",
    ]  # fmt: skip


def test_seconds_of_a_block_are_logged_on_rank_0(caplog):
    caplog.set_level(logging.INFO)
    for condition, rank in ((True, 1), (False, 0), (True, 0)):
        with stand_ins.timeit(condition, f"Model creation {condition} {rank}", rank):
            pass
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["Model creation True 0"]
    assert caplog.records[0].getMessage().endswith(" s")


def test_a_script_without_logging_gets_lines_of_rank_0(monkeypatch, capsys):
    logger = logging.getLogger("smp")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.WARNING)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert stand_ins.get_logger() is stand_ins.get_logger()
    stand_ins.get_logger().info("hello")
    assert capsys.readouterr().out.count("hello") == 1


BLOCKS = [
    LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    ),
    GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    ),
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2)),
]


@pytest.mark.parametrize("model", BLOCKS, ids=lambda model: model.config.model_type)
def test_a_transformer_layer_is_every_block_of_a_decoder(model):
    layer = stand_ins.TransformerLayer
    found = [module for module in model.modules() if isinstance(module, layer)]
    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    assert found == list(blocks)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
    assert [m for m in model.modules() if policy(m, recurse=False, nonwrapped_numel=1)] == found
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))
    assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 2
    assert not isinstance(torch.nn.Linear(1, 1), layer)
    with pytest.raises(UserError, match="TransformerLayer cannot be built: build the model of transformers"):
        layer(16, 2)


def test_addresses_on_s3():
    assert stand_ins.is_s3_uri("s3://bucket/a/b") and stand_ins.is_s3_uri(pathlib.Path("s3://bucket/a"))
    assert not stand_ins.is_s3_uri("/data/s3://x") and not stand_ins.is_s3_uri(pathlib.Path("data"))
    assert stand_ins.parse_s3_uri("s3://bucket/a/b") == ("bucket", "a/b")
    assert stand_ins.parse_s3_uri("s3://bucket") == ("bucket", "")
    assert stand_ins.format_s3_path(pathlib.Path("s3://bucket/a/b")) == "s3://bucket/a/b"
    assert stand_ins.format_s3_path("s3://bucket/") == "s3://bucket"
    with pytest.raises(UserError, match="/data is not on S3: give s3://bucket/key"):
        stand_ins.parse_s3_uri("/data")


def test_a_function_is_called_again_after_failures(monkeypatch, caplog):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    calls = []

    @stand_ins.retry_with_jitter
    def read(succeeds_at: int) -> str:
        calls.append(succeeds_at)
        if len(calls) < succeeds_at:
            raise OSError("busy")
        return "content"

    assert read(3) == "content" and len(calls) == 3 and "read failed (busy): once more" in caplog.text
    calls.clear()
    with pytest.raises(OSError, match="busy"):
        read(4)
    assert len(calls) == 3


def test_a_local_paths_file_system_reads_and_writes(tmp_path):
    files = stand_ins.path_to_file_system(tmp_path)
    path = files.concat_path(tmp_path, "metadata")
    with files.create_stream(path, "wb") as stream:
        stream.write(b"5")
    assert pathlib.Path(path).read_bytes() == b"5"


@pytest.mark.full
def test_a_buckets_region_and_its_files_are_asked_for_by_s3fs(s3, proxy):  # noqa: F811
    assert stand_ins.get_s3_region_from_uri(f"{s3.url}/a") == "us-east-1"
    files = stand_ins.path_to_file_system(pathlib.Path(f"{s3.url}/a"))
    with files.create_stream(files.concat_path(f"{s3.url}/a", "metadata"), "wb") as stream:
        stream.write(b"5")
    assert s3.get("a/metadata") == b"5"
