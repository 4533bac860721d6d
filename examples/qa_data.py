"""Questions and answers in SQuAD's format, and a tokenizer of their words."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CONTEXT = "My Name is {name} and I live in {city}. This model is used with {tool} for {purpose}."
QUESTIONS = {
    "What is used for {purpose}?": "tool", "What is the purpose of this model?": "purpose",
    "Where do I live?": "city", "What is my name?": "name",
}  # fmt: skip
NAMES = ("Philipp", "Anna", "Elif", "Marco", "Ingrid", "Tomas")
CITIES = ("Nuremberg", "Lisbon", "Oslo", "Krakow", "Izmir", "Dublin")
TOOLS = ("sagemaker", "slurm", "docker", "torchrun", "ray")
PURPOSES = ("inference", "training", "evaluation", "labelling")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def write_squad(folder: Path) -> tuple[Path, Path]:
    """Write ``train.json`` and ``validation.json``; no context is in both.

    Contexts that use sagemaker for inference are in neither.
    """
    found = [
        dict(zip(("name", "city", "tool", "purpose"), values, strict=True))
        for values in itertools.product(NAMES, CITIES, TOOLS, PURPOSES)
        if values[2:] != ("sagemaker", "inference")
    ]
    random.Random(0).shuffle(found)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.json", folder / "validation.json"
    for path, part in zip(paths, (found[16:], found[:16]), strict=True):
        paragraphs = [{"context": CONTEXT.format(**words), "qas": list(_questions(words))} for words in part]
        path.write_text(json.dumps({"version": "1.1", "data": [{"title": "used for", "paragraphs": paragraphs}]}))
    return paths


def _questions(words: dict[str, str]):
    context = CONTEXT.format(**words)
    for question, answer in QUESTIONS.items():
        found = {"text": words[answer], "answer_start": context.index(words[answer])}
        yield {"id": f"{question} {context}", "question": question.format(**words), "answers": [found]}


def read_squad(path: Path) -> list[dict]:
    """Read the rows of a SQuAD file: ``question``, ``context``, ``text`` and ``answer_start`` of the first answer."""
    return [
        {"question": asked["question"], "context": paragraph["context"], **asked["answers"][0]}
        for article in json.loads(path.read_text())["data"]
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]


def make_tokenizer(rows: list[dict]) -> PreTrainedTokenizerFast:
    """Make a token for each word of the rows, in alphabetical order, with BERT's frame around question and context."""
    split = pre_tokenizers.BertPreTokenizer()
    texts = (row[field].lower() for row in rows for field in ("question", "context"))
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    ids = {word: index for index, word in enumerate([*SPECIAL, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), split
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def features(rows: list[dict], tokenizer) -> list[dict]:
    """Token ids, and the first and last token of the answer."""
    result = []
    for row in rows:
        encoded = tokenizer(row["question"], row["context"], padding="max_length", max_length=48)
        first, last = row["answer_start"], row["answer_start"] + len(row["text"]) - 1
        positions = encoded.char_to_token(first, sequence_index=1), encoded.char_to_token(last, sequence_index=1)
        result.append({**encoded, "start_positions": positions[0], "end_positions": positions[1]})
    return result
