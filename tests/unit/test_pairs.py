"""Pairs of answers: TRL's forms, what is refused, and both answers in one sequence."""

from __future__ import annotations

import logging
import pathlib

import numpy as np
import pytest
import torch

from smp.data.conversation import Chat
from smp.data.messages import ConversationError
from smp.data.packing import Collator
from smp.data.pairs import encode_pair
from smp.data.samples import Choice, PackedSamples
from smp.errors import UserError
from smp.train.preference import number_pairs
from tests.chat import chat_tokenizer, marked
from tests.unit.test_samples import stored

TEMPLATE = pathlib.Path(__file__).parents[2] / "data" / "sample" / "chat_template.jinja"
ASKED = {"role": "user", "content": "Where is the whale?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def said(text):
    return {"role": "assistant", "content": text}


def pair(sample):
    chat = Chat(chat_tokenizer(), TEMPLATE.read_text(encoding="ascii"))
    return [marked(*each) for each in encode_pair(chat, sample)]


def test_forms_of_trl_are_the_same_pair():
    texts = ("In the sea.", "At the mast.")
    expected = [f"User: Where is the whale?\nAssistant:⟦ {text}</s>⟧\n" for text in texts]
    chosen, rejected = ([said(text)] for text in texts)
    assert pair({"prompt": [ASKED], "chosen": chosen, "rejected": rejected}) == expected
    # Whole conversations, also beside the prompt as a text.
    whole = {"chosen": [ASKED, *chosen], "rejected": [ASKED, *rejected]}
    assert pair(whole) == expected == pair({**whole, "prompt": ASKED["content"]}) == pair({**whole, "prompt": None})
    more = [SYSTEM, ASKED, said("Which?"), ASKED]
    assert pair({"prompt": more, "chosen": chosen, "rejected": rejected})[0].count("⟦") == 1
    assert pair({"prompt": "Where is", "chosen": " the sea?", "rejected": " it?"}) == [
        "Where is⟦ the sea?</s>⟧", "Where is⟦ it?</s>⟧",
    ]  # fmt: skip


@pytest.mark.parametrize(("sample", "sentence"), [
    ({"prompt": "a", "chosen": "b"}, "is no pair: it has no rejected; keys found: prompt, chosen"),
    ({"messages": [ASKED]}, "is no pair: it has no chosen; keys found: messages"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has the same answer as chosen and as rejected"),
    ({"chosen": [said("a")], "rejected": [said("b")]}, "has no prompt: chosen and rejected begin with different"),
    ({"prompt": [ASKED], "chosen": [ASKED, said("a")], "rejected": [said("b")]}, "begins with a message of user"),
    ({"chosen": "a", "rejected": "b"}, "must have prompt, chosen and rejected as texts, or as lists"),
    ({"prompt": [ASKED], "chosen": [said("a")], "rejected": []}, "as lists of messages that are not empty"),
    ({"chosen": [ASKED], "rejected": [ASKED, said("a")]}, "an answer that begins with all of the other"),
    ({"prompt": "a", "chosen": [said("a")], "rejected": [said("b")]}, "has prompt as a text, and chosen"),
    ({"prompt": "a", "chosen": [ASKED, said("a")], "rejected": [ASKED, said("b")]}, "a prompt that is no message of"),
    ({"prompt": [ASKED], "chosen": [{"role": "tool", "content": "1"}], "rejected": [said("b")]}, "chosen: the chat"),
])  # fmt: skip
def test_what_is_no_pair_is_one_sentence(sample, sentence):
    with pytest.raises(ConversationError, match=sentence):
        pair(sample)


def packed(stores, **choice):
    options = {"what": "training data", "origins": ["a.jsonl", "b.jsonl"], "pairs": True}
    return PackedSamples(stores, 8, "f", Choice(**choice), **options)


def test_a_pair_is_in_one_sequence_and_numbered(caplog):
    caplog.set_level(logging.INFO, "smp.data")
    found = packed([stored(".xx", ".x", ".x", ".x"), stored("..x", "..xx", first=100)])
    rows = found.rows(np.arange(len(found)))
    assert [row.documents.tolist() for row in rows] == [[3, 2], [2, 2], [3, 4]]
    assert found.numbers.tolist() == [0, 1, 2] and "3 samples in 3 sequences" in caplog.text
    collate = Collator(sequence_length=8, pad_token_id=0, document_end=3)
    numbered = number_pairs(collate([rows[0], rows[2]]))
    assert numbered["sequence_tokens"].tolist() == [2, 1, 1, 2]
    valid = numbered["targets"] != -100
    assert numbered["sequences"][valid].tolist() == [0, 0, 1, 2, 3, 3]
    empty = number_pairs(collate([None]))
    assert empty["sequence_tokens"].tolist() == [0, 0] and not empty["sequences"].any()
    assert isinstance(empty["sequences"], torch.Tensor)


def test_a_pair_that_is_too_long(caplog):
    caplog.set_level(logging.INFO, "smp.data")
    # Of the last, what is trained on of the rejected answer is behind where it is cut.
    data = [stored(".x", ".xxxxxxxxx", ".xxxxxx", ".xxxxx", ".xxx", ".....xx")]
    cut = packed(data)
    assert [row.documents.tolist() for row in cut.rows(np.arange(len(cut)))] == [[2, 6], [4, 4]]
    assert "3 cut as too long, 1 left out as nothing of them is trained on" in caplog.text
    with pytest.raises(UserError, match=r"no token to train on: all 0 samples .* raise --max_context_width"):
        packed(data, overlong="drop")
    with pytest.raises(UserError, match=r"a\.jsonl, sample 1 has 12 tokens, more than --max_context_width 8"):
        packed(data, overlong="refuse")
