"""Raw text: data/pipelines/text.py."""

import gzip
import hashlib
import json
import shutil

import fsspec
import numpy as np
import pytest

from data.sample.build import HERE
from smp.data import text as module
from smp.data.storage import list_files
from smp.data.text import TextTokenizer, contradiction, open_text, read_documents, text_files_format
from smp.errors import UserError

TOKENIZER = HERE / "tokenizer"
EOS = 0


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(str(TOKENIZER))


def open_all(path, cache, tokenizer, width=8, separator=None):
    files = list_files(str(path), extensions=(".txt",))
    form = text_files_format(tokenizer, separator)
    return open_text(files, form, tokenizer, sequence_length=width, cache_dir=str(cache), separator=separator)


def ids_of(source):
    return [token for index in range(len(source)) for token in source.rows(np.array([index]))[0].tokens.tolist()]


def decoded(source, tokenizer):
    """The documents' texts."""
    found = tokenizer._tokenizer.decode(ids_of(source)).split("<|endoftext|>")
    assert found.pop() == ""
    return found


def test_a_file_is_a_document_and_rows_cross_files(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("One day.\n\nAnother day.\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\ufeffNaïve £5\r\nend".encode()))
    source = open_all(tmp_path, tmp_path / "cache", tokenizer, width=7)
    assert decoded(source, tokenizer) == ["One day.\n\nAnother day.\n", "Naïve £5\nend"]
    assert {len(source.rows(np.array([index]))[0].tokens) for index in range(len(source) - 1)} == {7}


@pytest.mark.parametrize("separator,content", [("", "a b\nc\n\n \n\nd\n"), ("---", "a b\nc\n---\n--- \nd\n")])
def test_a_separator_line_ends_a_document(tmp_path, tokenizer, separator, content):
    (tmp_path / "a.txt").write_text(content)
    assert decoded(open_all(tmp_path, tmp_path, tokenizer, separator=separator), tokenizer) == ["a b\nc\n", "d\n"]


def test_a_document_ends_once(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("One day.<|endoftext|>")
    (tmp_path / "b.txt").write_text("Another.")
    assert decoded(open_all(tmp_path, tmp_path, tokenizer), tokenizer) == ["One day.", "Another."]


def test_other_file_systems(tmp_path, tokenizer):
    with fsspec.open("memory://texts/a.txt", "w") as handle:
        handle.write("Hello there.")
    assert decoded(open_all("memory://texts", tmp_path, tokenizer), tokenizer) == ["Hello there."]


def test_the_sample_has_the_tokens_its_baseline_counts(tmp_path, tokenizer):
    expected = json.loads((HERE / "baseline.json").read_text())
    for name, key in (("train.txt", "train_tokens"), ("validation.txt", "validation_tokens")):
        assert len(ids_of(open_all(HERE / name, tmp_path, tokenizer, width=256))) == expected[key]


@pytest.mark.parametrize("content", ["word " * 40, "é" * 90, "line one\nline two\n" * 9, "\n" * 50 + "x"])
def test_large_documents_are_read_in_bounded_pieces(tmp_path, tokenizer, monkeypatch, content):
    """Even a file that is one long line, and whatever bytes a piece ends in."""
    monkeypatch.setattr(module, "PART", 17)
    monkeypatch.setattr(module, "BATCH", 40)
    (tmp_path / "a.txt").write_text(content)
    pieces = [len(text) for (text, _), _ in module.read_text(list_files(str(tmp_path), extensions=(".txt",))[0], None)]
    assert max(pieces) <= 3 * 17 and len(pieces) > 2
    assert decoded(open_all(tmp_path, tmp_path, tokenizer), tokenizer)[0].lstrip() == content.lstrip()


@pytest.mark.parametrize(
    "content,words",
    [(b"fine\nbad \xff byte\n", "line 2: not UTF-8"), (b"fine\ncaf\xc3", "line 2: ends inside"), (b" \n", "no text")],
)
def test_a_file_that_is_no_text_is_named(tmp_path, tokenizer, content, words):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"a.txt.*{words}"):
        open_all(tmp_path, tmp_path / "cache", tokenizer)


def test_line_numbers_count_lines_not_pieces():
    parts = [b"one", b" still one\n", b"two\n", b"\xff"]
    with pytest.raises(UserError, match="f, line 3"):
        list(read_documents(parts, None, "f"))


CUTS = {
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 5, "pad_type_id": 0,
        "pad_token": "%",
    },
}  # fmt: skip


def changed(folder, change):
    """The tokenizer with its tokenizer.json changed."""
    shutil.copytree(TOKENIZER, folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    change(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return TextTokenizer(str(folder))


@pytest.mark.parametrize("cut", CUTS)
def test_a_saved_truncation_or_padding_touches_no_document(tmp_path, tokenizer, cut):
    (tmp_path / "a.txt").write_text("A document of more than four tokens.")
    cutting = changed(tmp_path / "t", lambda spec: spec.update({cut: CUTS[cut]}))
    assert ids_of(open_all(tmp_path, tmp_path / "c", cutting)) == ids_of(open_all(tmp_path, tmp_path / "c", tokenizer))
    # What the files alone name may be cached from documents that were cut.
    files = sorted((tmp_path / "t").iterdir())
    assert cutting.digest != plain_digest(files) and tokenizer.digest == plain_digest(sorted(TOKENIZER.iterdir()))


def plain_digest(files):
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def test_a_token_under_two_ids_is_a_contradiction_and_an_added_one_is_not(tmp_path):
    def swap(spec):
        vocabulary = spec["model"]["vocab"]
        one, two = sorted(vocabulary, key=vocabulary.get)[-2:]
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]

    def add(spec):
        spec["added_tokens"].append({**spec["added_tokens"][0], "id": 70_000, "content": "<|new|>"})

    changed(tmp_path / "swapped", swap)
    changed(tmp_path / "added", add)
    assert " is " in contradiction(str(TOKENIZER), str(tmp_path / "swapped"))
    assert contradiction(str(TOKENIZER), str(tmp_path / "added")) is None
    assert contradiction(str(tmp_path / "added"), str(TOKENIZER)) is None
    assert contradiction(str(TOKENIZER), str(tmp_path / "absent")) is None


def test_ids_with_gaps_are_below_the_vocabulary(tmp_path):
    def move(spec):
        vocabulary = spec["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.get)] = 70_000

    tokenizer = changed(tmp_path / "t", move)
    assert tokenizer.vocab_size == 70_001 > len(tokenizer._tokenizer)
    (word,) = (word for word, place in tokenizer._tokenizer.get_vocab().items() if place == 70_000)
    (tmp_path / "a.txt").write_text(tokenizer._tokenizer.convert_tokens_to_string([word]) * 9)
    assert 70_000 in ids_of(open_all(tmp_path, tmp_path / "cache", tokenizer))
    tokenizer.require_below(70_000)
    with pytest.raises(UserError, match=r"a.txt, line 1: the text has .*, token id 70000, .*--vocab_size to at least"):
        open_all(tmp_path, tmp_path / "cache", tokenizer)


def test_another_tokenizer_is_another_cache(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("Hello there.")
    first = open_all(tmp_path, tmp_path / "cache", tokenizer)
    without_merges = changed(tmp_path / "tokenizer", lambda spec: spec["model"].update(merges=[]))
    second = open_all(tmp_path, tmp_path / "cache", without_merges)
    assert len(ids_of(second)) == len("Hello there.") + 1 != len(ids_of(first))
    assert first.fingerprint != second.fingerprint


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer in .*nowhere"):
        TextTokenizer(str(tmp_path / "nowhere"))


def test_a_tokenizer_without_an_end_is_named(tmp_path):
    shutil.copytree(TOKENIZER, tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="no eos_token"):
        TextTokenizer(str(tmp_path / "t"))


def with_added(folder, *, bos=True, chat=False):
    """The sample's tokenizer with added tokens beyond its vocabulary, and a post-processor as Gemma's."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    raw.add_special_tokens(["<bos>", "<image>"])
    before = "$A <|endoftext|>" if not bos else "<bos> <image> $A" if chat else "<bos> $A"
    known = [(word, raw.token_to_id(word)) for word in ("<bos>", "<image>", "<|endoftext|>")]
    raw.post_processor = processors.TemplateProcessing(single=before, special_tokens=known)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token="<|endoftext|>")
    made.save_pretrained(folder)
    return TextTokenizer(str(folder))


BOS, IMAGE = 2048, 2049


@pytest.mark.parametrize("prefix", [[BOS], [BOS, IMAGE], []])
def test_each_document_begins_as_the_tokenizer_begins_a_text(tmp_path, tokenizer, monkeypatch, prefix):
    """Once each, also where a document is tokenised in parts or has it already."""
    own = with_added(tmp_path / "t", bos=bool(prefix), chat=len(prefix) > 1)
    assert own.prefix == prefix
    (tmp_path / "a.txt").write_text("One.\n---\n \n---\nTwo words.\n---\n")
    plain = ids_of(open_all(tmp_path, tmp_path / "plain", tokenizer, separator="---"))
    expected = [each for each in np.split(plain, np.flatnonzero(np.equal(plain, EOS)) + 1) if len(each)]
    found = ids_of(open_all(tmp_path, tmp_path / "cache", own, separator="---"))
    assert found == [int(each) for ids in expected for each in (*prefix, *ids)] and len(expected) == 2
    if prefix:
        word = own.text([BOS]) + (own.text([IMAGE]) if len(prefix) > 1 else "")
        (tmp_path / "a.txt").write_text(f"{word}One.\n---\n{word}Two words.\n")
        assert ids_of(open_all(tmp_path, tmp_path / "cache", own, separator="---")) == found
    monkeypatch.setattr(module, "PART", 17)
    monkeypatch.setattr(module, "BATCH", 40)
    (tmp_path / "a.txt").write_text("\n" * 60 + "word " * 40)
    assert ids_of(open_all(tmp_path, tmp_path / "parts", own)).count(BOS) == len(prefix[:1])


def test_what_begins_a_document_is_another_cache(tmp_path, tokenizer):
    """Of tokenizers that put nothing there the cache stays what it was."""
    own = with_added(tmp_path / "t")
    files = sorted((tmp_path / "t").iterdir())
    assert own.digest != plain_digest(files)
    ending = with_added(tmp_path / "e", bos=False)
    assert ending.digest == plain_digest(sorted((tmp_path / "e").iterdir()))


def test_a_token_beyond_the_vocabulary_is_refused_where_a_text_has_it(tmp_path):
    """As Gemma 3's tokenizer has one for images, which the model lacks."""
    own = with_added(tmp_path / "t", bos=False)
    own.require_below(2048)
    lines = ["fine\n", "also <b>fine\n", "bad <image>\n"]
    (tmp_path / "a.txt").write_text("".join(lines[:2]))
    assert max(ids_of(open_all(tmp_path, tmp_path / "c", own))) < 2048
    (tmp_path / "a.txt").write_text("".join(lines))
    words = "the text has '<image>', token id 2049, which is outside the model's vocabulary of 2048"
    with pytest.raises(UserError, match=f"a.txt, line 3: {words}"):
        open_all(tmp_path, tmp_path / "c", own)
    own.require_below(2050)
    open_all(tmp_path, tmp_path / "c", own)
    own.require_below(2048)
    with pytest.raises(UserError, match=f"a.txt, line 3: {words}"):  # from the cache
        open_all(tmp_path, tmp_path / "c", own)
    with_bos = with_added(tmp_path / "b")
    with pytest.raises(
        UserError,
        match=r"puts tokens \[2048, 0\] around documents, and .* is 2048: set --vocab_size .*resize_token_embeddings",
    ):
        with_bos.require_below(2048)
