"""Ask a chat model, on one process: python examples/ask.py runs/sft/final "Where is Lucas Lodge?"."""

from __future__ import annotations

import sys

from transformers import pipeline


def ask(folder: str, question: str) -> str:
    """Return what the model answers."""
    chat = pipeline("text-generation", model=folder, tokenizer=str(folder))  # else an adapter's base has the tokenizer
    (found,) = chat([{"role": "user", "content": question}], max_new_tokens=40, do_sample=False)
    return found["generated_text"][-1]["content"].strip()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} MODEL_DIR QUESTION")
    print(ask(*sys.argv[1:]))
