"""Attention on a GPU, on fake CUDA tensors: the kernels, no mask of a whole sequence, and no synchronisation."""

import pytest

from tests.cuda_path.reports import FOUR_BLOCKS, report

# A small vocabulary, of which random tokens are often the one that ends a document.
DOCUMENTS = ("--document_mask", "1", "--tokenizer_name_or_dir", "data/sample/tokenizer", "--vocab_size", "1024")
MISTRAL = ("--model", "mistral7b", "--num_layers", "4", "--max_context_width", "8192", "--train_batch_size", "2")
FUSED = ("--attn_implementation", "fused")
VARLEN, RECOMPUTED = "torch_attn._varlen_attn.default", 2


def attention_of(step):
    return {name: n for name, n in step["operations"].items() if "attn" in name or "attention" in name}


def reads_of_attention(step):
    text = " ".join(step["syncs"])
    return [word for word in ("attention", "masking_utils", "tensor/forward", "loss.py") if word in text]


@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("--tensor_parallel_degree", "8")])
def test_documents_go_by_their_lengths(more):
    step = report(*FOUR_BLOCKS, *DOCUMENTS, *FUSED, *more)["steps"][-1]
    assert attention_of(step) == {VARLEN: 4 * RECOMPUTED, "torch_attn._varlen_attn_backward.default": 4}
    assert reads_of_attention(step) == []


@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("--tensor_parallel_degree", "8"), DOCUMENTS])
def test_plain_attention_reads_nothing(more):
    step = report(*FOUR_BLOCKS, *more)["steps"][-1]
    assert reads_of_attention(step) == []
    assert VARLEN not in attention_of(step)


@pytest.mark.full
def test_sliding_windows_go_by_lengths():
    step = report(*MISTRAL, *FUSED)["steps"][-1]
    assert attention_of(step)[VARLEN] == 4 * RECOMPUTED
    assert reads_of_attention(step) == []


@pytest.mark.full
def test_the_choice_is_logged_and_off_until_measured():
    found = report(*FOUR_BLOCKS)
    assert "attn_implementation" in found["log"] and "not yet measured on a GPU" in found["log"]
    assert VARLEN not in attention_of(found["steps"][-1])
