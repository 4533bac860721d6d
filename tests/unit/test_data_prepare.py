"""The packer: data/prepare.py."""

import gzip
import json

import pytest

from data.sample.build import HERE
from smp.data.data_pipeline import BatchShape, DataConfig, create_data_pipeline
from smp.data.prepare import in_validation, main
from smp.data.text import TextTokenizer

TOKENIZER = str(HERE / "tokenizer")
EOS = 0


def run(tmp_path, *options, width=16, output="out", fraction=0.3, tokenizer=TOKENIZER):
    return main(
        ["--input", str(tmp_path / "in"), "--output", str(tmp_path / output), "--tokenizer", str(tokenizer),
         "--sequence_length", str(width), "--validation_fraction", str(fraction), *options]
    )  # fmt: skip


def rows(folder):
    import datasets

    return datasets.load_from_disk(str(folder))["input_ids"]


def documents(folder):
    flat = [token for row in rows(folder) for token in row]
    text = TextTokenizer(TOKENIZER)._tokenizer.decode(flat)
    assert flat[-1] == EOS
    return text.removesuffix("<|endoftext|>").split("<|endoftext|>")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def test_text_is_packed_and_split_by_document(tmp_path, folder):
    texts = [f"Document number {index}.\n" for index in range(40)]
    (folder / "a.txt").write_text("\n".join(texts[:20]))
    (folder / "b.txt.gz").write_bytes(gzip.compress("\n".join(texts[20:]).encode()))
    assert run(tmp_path, "--text_document_separator", "") == 0
    train, validation = documents(tmp_path / "out" / "train"), documents(tmp_path / "out" / "validation")
    assert sorted(train + validation) == sorted(texts) and len(validation) >= 4
    assert [in_validation(index, 0.3) for index in range(40)] == [text in validation for text in texts]
    lengths = [len(row) for row in rows(tmp_path / "out" / "train")]
    assert set(lengths[:-1]) == {16} and 0 < lengths[-1] <= 16
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_a_file_named_twice_is_refused(tmp_path, folder, capsys):
    (folder / "a.txt").write_text("One day.\n")
    (tmp_path / "link.txt").symlink_to(folder / "a.txt")
    for other in (folder / "a.txt", tmp_path / "link.txt"):
        assert run(tmp_path, "--input", str(folder), str(other), fraction=0) == 2
        assert "a.txt twice, which would be read twice: give it once" in capsys.readouterr().err


def test_the_split_is_a_fraction_and_only_grows_with_it():
    held = {fraction: {i for i in range(10_000) if in_validation(i, fraction)} for fraction in (0, 0.01, 0.2)}
    assert not held[0] and held[0.01] < held[0.2]
    assert 70 < len(held[0.01]) < 130 and 1900 < len(held[0.2]) < 2100


def test_json_lines_of_text_and_of_ids(tmp_path, folder):
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"body": f"Text {i}."}) for i in range(9)))
    assert run(tmp_path, "--text_key", "body", fraction=0) == 0
    flat = [token for row in rows(tmp_path / "out" / "train") for token in row]
    assert flat.count(EOS) == 9 and not (tmp_path / "out" / "validation").exists()
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"input_ids": ids}) for ids in ([5, 6], [7, EOS])))
    assert run(tmp_path, fraction=0, output="ids") == 0
    assert [token for row in rows(tmp_path / "ids" / "train") for token in row] == [5, 6, EOS, 7, EOS]


def test_the_result_trains(tmp_path, folder):
    (folder / "a.txt").write_text("\n\n".join(f"Paragraph {index}." for index in range(50)))
    assert run(tmp_path, "--text_document_separator", "") == 0
    out, cache = str(tmp_path / "out"), str(tmp_path / "cache")
    config = DataConfig(dataset_type="hf", training_dir=out, test_dir=out, validation_freq=1, data_cache_dir=cache)
    batch = BatchShape(
        sequence_length=16, vocab_size=2048, global_batch_size=2, micro_batch_size=2, data_rank=0, data_size=1, seed=0
    )
    train, validation = (create_data_pipeline(config, split=split, batch=batch) for split in ("train", "validation"))
    assert train.samples_per_epoch == len(rows(tmp_path / "out" / "train"))
    assert next(iter(validation)).microbatches[0]["input_ids"].shape == (2, 16)


def test_what_cannot_be_used_ends_with_a_sentence(tmp_path, folder, capsys):
    (folder / "a.jsonl").write_text('{"text": "fine"}\n{"other": 1}\n')
    (folder / "b.txt").write_text("One document.")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for options, changed, words in (
        (["--input_type", "jsonl"], {}, "a.jsonl, line 2: has no text; found: other"),
        (["--input_type", "text"], {}, "the input has 1 document(s), and none fell to"),
        ([], {"output": "full"}, "full exists and is not empty"),
        ([], {"width": 0}, "--sequence_length must be at least 1"),
        (["--input_type", "text", "--tokenizer", str(tmp_path)], {}, "no tokenizer in"),
    ):
        assert run(tmp_path, *options, **changed) == 2
        assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "in"]


def test_output_may_be_an_empty_folder(tmp_path, folder):
    (folder / "b.txt").write_text("One document.")
    (tmp_path / "out").mkdir()
    assert run(tmp_path, fraction=0) == 0
    assert documents(tmp_path / "out" / "train") == ["One document."]


@pytest.mark.parametrize("more", [{"labels": [-100, 6]}, {"attention_mask": [0, 1]}])
def test_rows_that_are_not_all_trained_on_are_refused(tmp_path, folder, capsys, more):
    """Rows of ids alone would train on prompts and padding."""
    plain = {"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [1, 1]}
    (folder / "a.jsonl").write_text(json.dumps(plain) + "\n")
    assert run(tmp_path, fraction=0) == 0
    (folder / "a.jsonl").write_text(json.dumps(plain) + "\n" + json.dumps(plain | more) + "\n")
    assert run(tmp_path, fraction=0, output="other") == 2
    (name,) = more
    assert f"the input has {name} that keep tokens out of the loss" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
