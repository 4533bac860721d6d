"""A small tokenizer with the special tokens of many chat templates, and the templates' files."""

import functools
import pathlib

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = pathlib.Path(__file__).parent / "data" / "chat_templates"
SPECIAL = [
    "<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|end|>", "<|return|>", "<|message|>",
    "<|channel|>", "<|user|>", "<|assistant|>", "<think>", "</think>",
]  # fmt: skip


@functools.cache
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer whose merges join words with the space before them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator(["Where is the whale? It is in the deep sea, and I am at the mast."], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def marked(ids: np.ndarray, labels: np.ndarray) -> str:
    """Return the text of a sample, with what is trained on between ⟦ and ⟧."""
    text, inside = "", False
    for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
        assert label in (-100, token)
        if inside != (label != -100):
            inside = not inside
            text += "⟦" if inside else "⟧"
        text += chat_tokenizer().decode([token], skip_special_tokens=False)
    return text + ("⟧" if inside else "")
