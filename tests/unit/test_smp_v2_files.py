"""Files of SMP v2's users that are not read: the refusals say what to do, and what the pages give for it works."""

from __future__ import annotations

import json
import pathlib
import re
import runpy
import struct
import sys

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from smp.checkpoint.directory import choose_checkpoint, refuse_foreign
from smp.data.storage import JSONL, list_files
from smp.errors import UserError
from smp.models.model_config import resolve_model
from smp.models.registry import build_model
from smp.train.arguments import parse_args
from tests.job import LLAMA

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def run_lines(page: str, name: str, tmp_path, monkeypatch, *arguments: object) -> None:
    """Run the lines that a page says to save as ``name``."""
    (text,) = re.findall(rf"Save as `{name}`:\n\n```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(tmp_path / name))


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint as SMP v2's script writes one with FSDP: model and optimizer by ``torch.distributed.checkpoint``."""
    config = resolve_model(parse_args([*map(str, LLAMA), "--use_synthetic_data", "1"]).model).hf_config
    config.save_pretrained(tmp_path / "config")
    model = build_model(config, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    states = {names[index]: state for index, state in optimizer.state_dict()["state"].items()}
    path = tmp_path / "old" / "llama_v2-5steps"
    dcp.save({"model": model.state_dict(), "optimizer": {"state": states}, "total_steps": 5}, checkpoint_id=path)
    return path, model


def test_a_sharded_checkpoint_is_no_start_and_says_what_is(sharded, tmp_path):
    path, _ = sharded
    expected = r"old/llama_v2-5steps contains .distcp files, which .*docs/resume_and_finetune.md.*--hf_pretrained"
    for wanted in (str(path), "latest"):
        with pytest.raises(UserError, match=expected):
            choose_checkpoint(wanted, [path.parent], "llama_v2")
    split = path.rename(tmp_path / "tp2-0")
    path.mkdir()
    split.rename(path / "tp2-0")
    with pytest.raises(UserError, match=expected):
        choose_checkpoint(str(path), [], "llama_v2")


def test_a_directory_with_old_checkpoints_is_named_by_the_flag_that_gave_it(sharded, tmp_path):
    path, _ = sharded
    for run_dir, flag in ((tmp_path / "run", "checkpoint_dir"), (tmp_path, "output_dir")):
        with pytest.raises(UserError, match=rf"\(llama_v2-5steps\): choose another --{flag}$"):
            refuse_foreign([path.parent], run_dir=run_dir)


def test_a_sharded_checkpoint_becomes_a_model_directory(sharded, tmp_path, monkeypatch):
    path, model = sharded
    arguments = (path, tmp_path / "config", tmp_path / "made")
    run_lines("resume_and_finetune.md", "from_smp_v2.py", tmp_path, monkeypatch, *arguments)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made").state_dict()
    assert made.keys() == model.state_dict().keys()
    assert all(torch.equal(made[name], value) for name, value in model.state_dict().items())
    words = ["--hf_pretrained_model_name_or_dir", str(tmp_path / "made"), "--use_synthetic_data", "1"]
    assert resolve_model(parse_args(words).model).weights == tmp_path / "made"


ROWS = [[5, 6, 7], [8], [9, 70000, 11, 12]]


def write_indexed(prefix: pathlib.Path, code: int, dtype) -> None:
    """Write token files of Megatron-LM's format, version 1."""
    sizes = numpy.array([len(row) for row in ROWS])
    numpy.concatenate(ROWS).astype(dtype).tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(ROWS), len(ROWS) + 1))
        file.write(sizes.astype(numpy.int32).tobytes())
        file.write(((sizes.cumsum() - sizes) * numpy.dtype(dtype).itemsize).astype(numpy.int64).tobytes())
        file.write(numpy.arange(len(ROWS) + 1).astype(numpy.int64).tobytes())


@pytest.mark.parametrize(("code", "dtype"), [(4, numpy.int32), (8, numpy.uint16)])
def test_token_files_of_megatron_become_json_lines(code, dtype, tmp_path, monkeypatch):
    write_indexed(tmp_path / "corpus", code, dtype)
    target = tmp_path / "train.jsonl"
    run_lines("data.md", "idx_to_jsonl.py", tmp_path, monkeypatch, tmp_path / "corpus", target)
    rows = [json.loads(line)["input_ids"] for line in target.read_text().splitlines()]
    assert rows == [numpy.array(row).astype(dtype).tolist() for row in ROWS]


@pytest.mark.parametrize("given", ["", "corpus", "corpus.bin", "corpus.idx", "*.bin"])
def test_token_files_of_megatron_are_named_where_they_are_given(given, tmp_path):
    write_indexed(tmp_path / "corpus", 4, numpy.int32)
    with pytest.raises(UserError, match=r"not read.*: token files of Megatron-LM and NeMo, .* lines in docs/data\.md"):
        list_files(str(tmp_path / given), extensions=JSONL)
