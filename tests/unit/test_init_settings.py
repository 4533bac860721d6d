"""What ``smp.init`` is given: by which names, of which types."""

from __future__ import annotations

import re

import pytest

from smp.compat.init_settings import in_names_of_init, read_settings, read_smp_keys
from smp.config import LossConfig, ParallelConfig
from smp.environment import sagemaker_parameters
from smp.errors import ConfigError, UserError
from smp.mesh import resolve_mesh


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), (" 2 ", 2), ("true", True), ("False", False), ("1.5", 1.5), (2, 2), (None, None), ("p2p", "p2p"),
     ("[1]", "[1]"), ("null", "null"), ("NaN", "NaN"), ("[" * 100_000, "[" * 100_000)],
)  # fmt: skip
def test_texts_are_the_numbers_and_booleans_that_they_are_in_json(text, value):
    found = read_settings({"tensor_parallel_degree": text}, {}, {})["tensor_parallel_degree"]
    assert found == value and type(found) is type(value)


def test_all_keys_of_smp_v2_may_be_texts():
    given = {
        "hybrid_shard_degree": "2", "tensor_parallel_degree": "2", "context_parallel_degree": "1",
        "expert_parallel_degree": "1", "sm_activation_offloading": "True", "activation_loading_horizon": "4",
        "fsdp_cache_flush_warnings": "false", "allow_empty_shards": "False", "random_seed": "7",
    }  # fmt: skip
    values = read_settings(given, {}, {})
    assert read_smp_keys(values) == {
        "sm_activation_offloading": True, "allow_empty_shards": False,
        "random_seed": 7, "activation_loading_horizon": 4,
    }  # fmt: skip
    parallel = ParallelConfig(**values)
    assert (parallel.hybrid_shard_degree, parallel.tensor_parallel_degree) == (2, 2)
    assert parallel.fsdp_cache_flush_warnings is False


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        (ParallelConfig, {"tensor_parallel_degree": "x"}, "--tensor_parallel_degree must be an integer, got 'x'"),
        (ParallelConfig, {"hybrid_shard_degree": 2.0}, "--hybrid_shard_degree must be an integer, got 2.0"),
        (ParallelConfig, {"hybrid_shard_degree": True}, "--hybrid_shard_degree must be an integer, got True"),
        (ParallelConfig, {"shared_buffers": "no"}, "--shared_buffers must be 0 or 1, got 'no'"),
        (LossConfig, {"z_loss": "x"}, "--z_loss must be a number, got 'x'"),
        (
            ParallelConfig,
            {"sharding_strategy": "x"},
            "--sharding_strategy takes auto, no_shard, shard_grad_op, hybrid_shard, _hybrid_shard_zero2, full_shard, "
            "got 'x'",
        ),
    ],
)
def test_a_value_of_another_type_is_a_sentence(kind, values, sentence):
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        kind(**values)
    assert ParallelConfig(shared_buffers=1, hybrid_shard_degree=1).shared_buffers


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tp": 3}, "smp.init: tp 3 does not divide the 2 processes: choose one of 1, 2"),
        ({"tensor_parallel_degree": 3}, "smp.init: tensor_parallel_degree 3 does not divide the 2 processes"),
        (
            {"dp_shard": 3},
            "smp.init: dp_shard 3 does not divide the 2 data-parallel processes: choose dp_shard from 1, 2",
        ),
        ({"cp": 0}, "smp.init: cp must be at least 1, got 0"),
    ],
)
def test_refusals_have_the_names_that_init_was_given(given, sentence):
    values = read_settings({}, given, {})
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"), in_names_of_init(given):
        resolve_mesh(ParallelConfig(**values), world_size=2, local_world_size=2)


def test_what_was_set_before_is_taken_and_nothing_contradicts_it():
    preset = {"tensor_parallel_degree": 2}
    assert read_settings({}, {}, preset) == read_settings({"tensor_parallel_degree": "2"}, {}, preset) == preset
    assert read_settings({}, {"tp": 2}, preset) == preset
    sentence = r"tensor_parallel_degree is 4, and smp\.state\.\w+ was set to 2 before: leave one out"
    with pytest.raises(UserError, match=sentence):
        read_settings({}, {"tp": 4}, preset)


def test_the_estimators_parameters_are_a_json_object():
    assert sagemaker_parameters({}) == sagemaker_parameters({"SM_HP_MP_PARAMETERS": ""}) == {}
    assert sagemaker_parameters({"SM_HP_MP_PARAMETERS": '{"random_seed": 3}'}) == {"random_seed": 3}
    for text in ("[1]", "{", "a=1,b=2"):
        with pytest.raises(
            UserError, match=r'is no JSON object such as \{"tensor_parallel_degree": 2\}: mend or unset'
        ):
            sagemaker_parameters({"SM_HP_MP_PARAMETERS": text})
