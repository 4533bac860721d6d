"""Ask a question-answering model about a text, on one process.

python examples/qa_answer.py runs/qa "What is used for inference?" "My Name is Philipp and I live in Nuremberg. \
This model is used with sagemaker for inference."

transformers 5 has no question-answering pipeline any more; this finds the most likely span as that one did.
"""

from __future__ import annotations

import functools
import string
import sys
from pathlib import Path

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

MOST_TOKENS = 15  # of an answer


@functools.cache
def load(folder: Path):
    return AutoTokenizer.from_pretrained(folder), AutoModelForQuestionAnswering.from_pretrained(folder).eval()


@torch.no_grad()
def answer(folder: Path, question: str, context: str) -> dict:
    """Answer with ``score`` (probability of the span), ``start`` and ``end`` in the context, ``answer``."""
    tokenizer, model = load(folder)
    encoded = tokenizer(question, context, return_offsets_mapping=True, return_tensors="pt")
    spans = encoded.pop("offset_mapping")[0].tolist()
    outputs = model(**encoded)
    outside = torch.tensor([part != 1 for part in encoded.sequence_ids()])
    first, last = (
        logits[0].masked_fill(outside, float("-inf")).softmax(0)
        for logits in (outputs.start_logits, outputs.end_logits)
    )
    pairs = torch.outer(first, last).triu().tril(MOST_TOKENS - 1)  # ends not before it starts
    begin, end = divmod(int(pairs.argmax()), pairs.shape[1])
    start, stop = spans[begin][0], spans[end][1]
    return {"score": pairs.max().item(), "start": start, "end": stop, "answer": context[start:stop]}


def scores(rows: list[dict], folder: Path) -> dict[str, float]:
    """SQuAD's exact match and F1 over the words, in percent."""
    exact, f1 = 0.0, 0.0
    for row in rows:
        got, expected = (
            set(text.lower().strip(string.punctuation).split())
            for text in (answer(folder, row["question"], row["context"])["answer"], row["text"])
        )
        exact += got == expected
        f1 += 2 * len(got & expected) / max(1, len(got) + len(expected))
    return {"exact_match": 100 * exact / len(rows), "f1": 100 * f1 / len(rows)}


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} MODEL_DIR QUESTION CONTEXT")
    print(answer(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
