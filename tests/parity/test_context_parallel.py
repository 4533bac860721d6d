"""Sequences split over ranks train like the plain Hugging Face model, with each document alone."""

from __future__ import annotations

import itertools

import pytest
import transformers  # noqa: F401  imported before the ranks are forked

from tests.context_parallel import CP_COMM_TYPES, Case, Choice, assert_parity, pairwise
from tests.reference import Layout

# Name: ranks, and degrees.
LAYOUTS = {
    "cp 2": (2, {"strategy": "full_shard", "cp": 2}),
    "cp 4": (4, {"strategy": "full_shard", "cp": 4}),
    "cp 2 x tp 2": (4, {"strategy": "shard_grad_op", "cp": 2, "tp": 2}),
    "cp 2 x data 2": (4, {"strategy": "full_shard", "cp": 2}),
    "cp 2 x replicas 2": (4, {"strategy": "hybrid_shard", "degree": 2, "cp": 2}),
}
LARGE = {
    "cp 2 x tp 2 x replicas 2": (8, {"strategy": "hybrid_shard", "degree": 2, "cp": 2, "tp": 2}),
    "cp 2 x data 2 x replicas 2": (8, {"strategy": "_hybrid_shard_zero2", "degree": 4, "cp": 2}),
    "cp 4 x tp 2": (8, {"strategy": "full_shard", "cp": 4, "tp": 2}),
    "cp 8": (8, {"strategy": "full_shard", "cp": 8}),
}
FACTORS = {
    "layout": list(LAYOUTS),
    "exchange": CP_COMM_TYPES,
    "model": ["llama", "mistral", "gpt_neox", "llama_tied"],
    "key_heads": [1, 2, 8],
    "documents": [False, True],
    "length": [27, 32],  # of which no layout divides the first, and all the second
    "backend": ["smddp", "gloo"],
    "balanced": [True, False],
    "mode": ["none", "full", "selective"],
    "offload": [False, True],
    "chunk": [7, 0],
    "z_loss": [0.0, 1e-3],
    "accumulation": [1, 2],
    "defer": [False, True],
    "keep": [False, True],
    "sequence": [True, False],
}


def allowed(choice: Choice) -> bool:
    return (
        (choice["model"] != "gpt_neox" or choice["key_heads"] == 8)
        and (not choice["z_loss"] or choice["chunk"] > 0)
        # The other settings would say nothing.
        and (choice["accumulation"] > 1 or not (choice["defer"] or choice["keep"]))
        and (choice["sequence"] or "tp" in choice["layout"])
    )


def case_of(choice: Choice) -> Case:
    world, degrees = (LAYOUTS | LARGE)[choice["layout"]]
    names = "exchange", "balanced", "offload", "chunk", "z_loss", "accumulation", "defer", "keep", "sequence"
    layout = Layout(
        **degrees,
        **{name: choice[name] for name in names},
        checkpointing=choice["mode"] != "none",
        mode="full" if choice["mode"] == "none" else choice["mode"],
    )
    return Case(layout, *(choice[name] for name in ("model", "key_heads", "documents", "length", "backend")), world)


@pytest.mark.full
def test_every_two_settings():
    # That of two data ranks is left to the others: replicas read different data, too.
    factors = FACTORS | {"layout": [name for name in LAYOUTS if name != "cp 2 x data 2"]}
    assert_parity([case_of(choice) for choice in pairwise(factors, allowed)])


@pytest.mark.slow
def test_every_two_settings_of_data_ranks():
    factors = FACTORS | {"layout": ["cp 2 x data 2"]}
    assert_parity([case_of(choice) for choice in pairwise(factors, allowed)])


@pytest.mark.slow
def test_every_two_settings_at_eight_ranks():
    factors = FACTORS | {"layout": list(LARGE), "accumulation": [1], "defer": [False], "keep": [False]}
    assert_parity([case_of(choice) for choice in pairwise(factors, allowed)])


def cross_of(exchange: str, world: int) -> list[Case]:
    """Heads, documents, models and backends at one exchange."""
    models = [(name, heads) for name in ("llama", "mistral") for heads in (1, 2, 8)] + [("gpt_neox", 8)]
    return [
        Case(Layout("full_shard", cp=world, exchange=exchange), *model, documents, 27, backend, world)
        for model, documents, backend in itertools.product(models, (False, True), ("gloo", "smddp"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("exchange", CP_COMM_TYPES)
def test_every_head_count_document_and_model(exchange, world):
    assert_parity(cross_of(exchange, world))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, *LARGE])
def test_every_exchange_with_documents_and_recomputation(layout):
    factors = {"exchange": CP_COMM_TYPES, "documents": [False, True], "mode": FACTORS["mode"]}
    others = {name: values[0] for name, values in FACTORS.items()}
    others |= {"layout": layout, "model": "mistral", "key_heads": 2, "offload": True}
    choices = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    assert_parity([case_of(others | choice) for choice in choices])
