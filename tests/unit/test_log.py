import io
import logging
import multiprocessing
import os
import re
import sys

import pytest

from smp.errors import UserError
from smp.log import configure_logging, get_logger, prepare_streams, redact, redacted


@pytest.fixture(autouse=True)
def restored_logger():
    logger = logging.getLogger("smp")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    for handler in logger.handlers:
        if handler not in before[0]:
            handler.close()
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


SECRET = "s3cr3tVALUE9"


@pytest.mark.parametrize(
    "text",
    [
        f"hf_access_token={SECRET}",
        f"token: {SECRET}",
        f"token: a{SECRET} of mine",
        f'{{"password": "{SECRET}", "n": 1}}',
        f"{{'AWS_SECRET_ACCESS_KEY': '{SECRET}'}}",
        f"WANDB_API_KEY = {SECRET}",
        f"apiKey: {SECRET}",
        f"--api_key {SECRET} --lr 1",
        f"Arguments [004/101] hf_access_token               : {SECRET}",
        f"https://user:{SECRET}@host/path",
        f"redis://:{SECRET}@host",
        f"https://b.s3.amazonaws.com/x?X-Amz-Security-Token={SECRET}&X-Amz-Signature={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"{{'Authorization': 'Basic {SECRET}'}}",
        f"db_password='{SECRET} with words'",
        f"MY_SECRETS={SECRET}",
        f"got hf_{SECRET}abcdefghij",
        f"pushed with ghp_{SECRET}abcdefghij",
    ],
)
def test_secrets_are_hidden(text):
    shown = redact(text)
    assert SECRET not in shown and "with words" not in shown
    assert "***" in shown


def test_json_keeps_its_shape_without_its_secrets():
    value = {
        "api_key": SECRET,
        "tokens": 5,
        "eos_token": "</s>",
        "a": [{"url": f"https://u:{SECRET}@host/x"}, None, True],
    }
    assert redacted(value) == {
        "api_key": "***", "tokens": 5, "eos_token": "</s>", "a": [{"url": "https://u:***@host/x"}, None, True],
    }  # fmt: skip


def test_aws_access_key_ids_are_hidden_without_a_name():
    assert redact("id AKIAIOSFODNN7EXAMPLE used") == "id *** used"


def test_only_the_value_is_hidden():
    assert redact('{"api_token": "abc", "lr": 0.1}') == '{"api_token": ***, "lr": 0.1}'
    assert redact("s3://user:pw@bucket/key") == "s3://user:***@bucket/key"


@pytest.mark.parametrize(
    "text",
    [
        "Batch 10 Loss: 3.2, Speed: 8.00 samples/sec, Tokens/sec: 4096, Memory: 1.50 GiB",
        "num_key_value_heads: 8, eos_token: </s>, pad_token='<pad>', vocab_size=50432",
        "tokens=4096 flops_per_token=1.2e9 tokenizer: data/sample",
        "hf_access_token: None, --hf_access_token None",
        "--hf_pretrained_model_name_or_dir /models/llama",
        "s3://bucket/key/a.jsonl:12: token id 50433 is not below the vocabulary size 50432",
        "python -m smp.data.prepare --text_key KEY reads another key",
        "missing key: model.layers.0.mlp.up_proj.weight",
        "Basic tokenization of ------------ 12 files",
        "ssh://git@github.com/a/b",
        "ends a turn with 'x', no special token: a model trained so would not stop",
        "this user has no entry in passwd: set HOME to a folder",
    ],
)
def test_ordinary_text_is_left_alone(text):
    assert redact(text) == text


def test_rank_0_prints_in_smp_format_and_writes_its_file(tmp_path, capsys):
    configure_logging(rank=0, local_rank=0, world_size=2, log_dir=tmp_path / "logs")
    get_logger("train_lib").info("hello token=%s", SECRET)
    line = capsys.readouterr().out.strip()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I \[test_log.py:\d+\] hello token=\*\*\*", line)
    assert (tmp_path / "logs/rank0.log").read_text().strip() == line


def test_a_traceback_is_redacted_too(tmp_path, capsys):
    configure_logging(rank=0, local_rank=0, world_size=1, log_dir=tmp_path)
    try:
        raise OSError(f"cannot open s3://me:{SECRET}@bucket")
    except OSError:
        get_logger("smp.data").exception("failed")
    shown = capsys.readouterr().out + (tmp_path / "rank0.log").read_text()
    assert "OSError" in shown and SECRET not in shown


def test_other_ranks_are_silent_but_keep_a_file(tmp_path, capsys):
    configure_logging(rank=1, local_rank=1, world_size=8, log_dir=tmp_path)
    get_logger("smp.x").error("of rank 1")
    configure_logging(rank=4, local_rank=0, world_size=8, log_dir=tmp_path)
    get_logger("smp.x").info("quiet")
    get_logger("smp.x").warning("loud")
    out = capsys.readouterr().out
    assert "of rank 1" not in out and "quiet" not in out
    assert out.startswith("[rank 4/8] ") and out.rstrip().endswith("loud")
    assert "of rank 1" in (tmp_path / "rank1.log").read_text()
    assert "quiet" in (tmp_path / "rank4.log").read_text()


def test_configuring_again_does_not_double_the_lines(tmp_path, capsys):
    for _ in range(2):
        configure_logging(rank=0, local_rank=0, world_size=1, log_dir=None)
    get_logger("smp").info("once")
    assert capsys.readouterr().out.count("once") == 1


def test_an_unwritable_folder_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the log file .*rank0\.log.*--output_dir"):
        configure_logging(rank=0, local_rank=0, world_size=1, log_dir=tmp_path / "file")


def test_a_closed_pipe_costs_its_lines_and_nothing_else(monkeypatch, tmp_path, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, open(writer, "w", buffering=1) as broken:
        patch.setattr(sys, "stdout", broken)
        configure_logging(rank=0, local_rank=0, world_size=1, log_dir=tmp_path)
        get_logger("x").info("nobody reads it")
        get_logger("x").info("%d", "no number")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what was kept can be written
    assert "nobody reads it" in (tmp_path / "rank0.log").read_text()
    said = capsys.readouterr().err
    assert "BrokenPipe" not in said and "TypeError: %d format" in said


def test_what_an_encoding_lacks_is_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    prepare_streams()
    print("3 µs")
    stream.flush()
    assert stream.buffer.getvalue() == b"3 \\xb5s\n"


def _without_streams(path):
    for descriptor in range(3):
        os.close(descriptor)
    sys.stdout = sys.stderr = None
    prepare_streams()
    with open(path, "w") as file:
        print("lost")
        print("lost", file=sys.stderr)
        os.write(2, b"lost")
        file.write(f"descriptor {file.fileno()}")


def test_nothing_is_printed_into_a_file_where_streams_are_closed(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_without_streams, args=(tmp_path / "file",))
    process.start()
    process.join()
    found = (tmp_path / "file").read_text()
    assert process.exitcode == 0 and int(found.removeprefix("descriptor ")) > 2


@pytest.mark.full
def test_a_full_disk_is_one_warning_and_no_traceback(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").symlink_to("/dev/full")
    configure_logging(rank=0, local_rank=0, world_size=1, log_dir=tmp_path / "logs")
    for number in range(3):
        get_logger("train").info("line %d", number)
    configure_logging(rank=0, local_rank=0, world_size=1, log_dir=None)  # closes the file
    out, err = capsys.readouterr()
    assert err == "" and [f"line {number}" in out for number in range(3)] == [True] * 3
    assert out.count("rank0.log cannot be written (No space left on device)") == 1
