"""Types of models whose attention has more than queries and keys, or not it alone, with their sequences split."""

from __future__ import annotations

import pytest
import transformers  # noqa: F401  imported before the ranks are forked

from tests.context_parallel import CP_COMM_TYPES
from tests.distributed import run_distributed
from tests.model_checks import Reference, assert_same_training, build_reference
from tests.reference import Layout

# Type and changes; what is in them.
MODELS = [
    ("gpt_oss", {}),  # sinks
    ("minicpm3", {}),  # values narrower than queries
    ("gemma2", {}),  # capped scores
    ("qwen3_next", {}),  # linear attention and convolutions, by heads and channels
    *(
        pytest.param(*each, marks=pytest.mark.full)
        for each in (
            ("qwen3_next", {"linear_num_key_heads": 3, "linear_num_value_heads": 3}),  # which the ranks do not divide
            ("nemotron_h", {}),  # two groups of heads, each of which two of four ranks share
            ("minimax", {}),  # linear attention of all tokens
            ("recurrent_gemma", {}),  # a state that positions restart
        )
    ),
]


def _check(reference: Reference, cp: int) -> None:
    for comm_type in CP_COMM_TYPES:
        assert_same_training(reference, Layout("full_shard", cp=cp, exchange=comm_type, checkpointing=True))


@pytest.mark.parametrize(("model_type", "changes"), MODELS)
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_cp_comm_type_trains_like_one_process(model_type, changes, cp):
    run_distributed(_check, build_reference(model_type, **changes), cp, world_size=cp)
