"""The bundled text: data/sample."""

import json
from pathlib import Path

import pytest

from data.sample.build import HERE, baseline

ROOT = Path(HERE)


@pytest.mark.full
def test_the_baseline_is_what_the_files_say():
    assert json.loads((ROOT / "baseline.json").read_text()) == baseline()


def test_training_and_validation_share_no_paragraph():
    paragraphs = [
        {line for line in (ROOT / name).read_text().splitlines() if len(line) > 60}
        for name in ("train.txt", "validation.txt")
    ]
    assert all(paragraphs) and not paragraphs[0] & paragraphs[1]


def test_the_tokenizer_loads_as_a_hugging_face_tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer")
    text = "It is a truth, universally — acknowledged.\n\nNaïve £5"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 2048 and tokenizer.eos_token_id == 0
