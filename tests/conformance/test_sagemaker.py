"""The table of SMP v2's names: every row is true, and the page made of it is current."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import re

import pytest
import torch
import torch.distributed as dist

import smp
from docs import make_tables
from docs.smp_v2_tables import FLAGS, KEYS, VARIABLES
from smp.compat.names import NAMES
from smp.errors import ConfigError, UserError
from smp.train import arguments
from tests.distributed import run_distributed

ROOT = pathlib.Path(__file__).parents[2]


def found(dotted: str):
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(found(module), name)


# Importing smp.sagemaker changes torch's names in a process: here only processes of their own do.
@pytest.mark.parametrize(
    "row", [r for r in NAMES if r.ours and not r.ours.startswith("smp.sagemaker")], ids=lambda row: row.original
)
def test_what_takes_a_names_place_is_there(row):
    assert found(row.ours) is not None


@pytest.mark.parametrize("row", [row for row in NAMES if not row.same], ids=lambda row: row.original)
def test_a_name_that_differs_says_what_to_do(row):
    assert len(row.note) > 10
    for name in re.findall(r"--(\w+)", row.note):
        assert name in arguments.FLAGS
    for dotted in re.findall(r"\bsmp\.[A-Za-z_.]*[A-Za-z_]", row.note):
        assert found(dotted) is not None


def _keys() -> None:
    for key in KEYS:
        mesh = smp.init({key.name: key.default})
        assert mesh is not None
        if key.refused:
            with pytest.raises(UserError, match=key.name):
                smp.init({key.name: key.given})
        else:
            smp.init({key.name: key.given})
    with pytest.raises(UserError, match="unknown key hybrid_shard_degre:"):
        smp.init({"hybrid_shard_degre": 2})
    assert dist.get_world_size() == 2


def test_every_key_is_taken_or_refused():
    run_distributed(_keys, world_size=2)


def test_every_variable_is_read():
    paths = [path for path in (ROOT / "smp").rglob("*.py") if path.parent.name != "compat"]
    sources = "".join(path.read_text() for path in paths)
    for _, ours, note in VARIABLES:
        assert note and f'"{ours}' in sources


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_has_the_status_that_the_page_says(name):
    status = make_tables.status(name)
    value = FLAGS[name] if FLAGS[name] not in (None, "") and not str(FLAGS[name]).startswith("$") else "1"
    try:
        arguments.parse_args(["--use_synthetic_data", "1", f"--{name}", str(value)])
        refusals = []
    except ConfigError as error:
        refusals = [problem for problem in error.problems if f"--{name}" in problem]
    if status in ("live", "no effect"):
        assert not any("unknown" in problem or "is not available" in problem for problem in refusals), refusals
    else:
        assert status == "limited"


@pytest.mark.smoke
def test_the_page_is_current():
    assert (ROOT / "docs" / "smp_v2_names.md").read_text() == make_tables.names_page(), "run `make docs`"


# What AWS's scripts import or use, by module: those that work, those that are refused, and those that they set.
USED = {
    "torch.sagemaker": "init is_initialized transform state",
    "torch.sagemaker.state_handler": "state",
    "torch.sagemaker.grad_norm": "clip_grad_norm_",
    "torch.sagemaker.delayed_param": "DelayedParamIniter",
    "torch.sagemaker.logger": "get_logger",
    "torch.sagemaker.utils.utils": "timeit",
    "torch.sagemaker.utils.process_group_utils": "get_global_ranks",
    "torch.sagemaker.checkpoint.utils": "SORT_BY_LAST_INT limit_num_subdirs",
    "torch.sagemaker.tensor_parallel.transformer": "TransformerLayer TETransformerLayer",
    "torch.sagemaker.moe.moe_config": "MoEConfig",
    "torch.sagemaker.moe.moe_layer": "MoELayer",
    "torch.sagemaker.distributed.fsdp.fully_sharded_data_parallel": "register_tp_processing_pre_comm_hook",
    "torch.sagemaker.distributed.fsdp.checkpoint": "save_model_checkpoint load_model_checkpoint EXPORT_KEY_MODEL "
    "EXPORT_KEY_OPTIMIZER EXPORT_KEY_SCHEDULER EXPORT_KEY_IDENTITY",
    "torch.sagemaker.distributed.checkpoint.filesystem": "path_to_file_system",
    "torch.sagemaker.distributed.checkpoint.s3_filesystem": "is_s3_uri parse_s3_uri format_s3_path "
    "get_s3_region_from_uri retry_with_jitter",
    "smdistributed.dataparallel.torch": "torch_smddp",
}
REFUSED = {
    "torch.sagemaker.checkpoint.constants": "SMP_IS_LOAD_INFO_KEY SMP_IS_PARTIAL_KEY",
    "torch.sagemaker.context_parallel.utils": "setup_transformer_engine_cp_groups",
    "torch.sagemaker.distributed.checkpoint.async_utils": "AsyncCallsQueue",
    "torch.sagemaker.distributed.checkpoint.filesystem": "DistributedFileSystemReader DistributedFileSystemWriter",
    "torch.sagemaker.distributed.checkpoint.s3_filesystem": "S3FileSystem",
    "torch.sagemaker.distributed.checkpoint.state_dict_loader": "load",
    "torch.sagemaker.distributed.checkpoint.state_dict_saver": "async_save PyTorchDistSaveShardedStrategy",
    "torch.sagemaker.distributed.checkpoint.state_dict_utils": "sm_state_dict_type SMStateDictType init_optim_state "
    "compute_auto_checkpoint_interval _Interval",
    "torch.sagemaker.nn.attn": "FlashSelfAttention",
    "torch.sagemaker.nn.huggingface.llama_flashattn": "LlamaFlashAttention",
}
UNKNOWN = {"torch.sagemaker": "nothing", "torch.sagemaker.moe.moe_layer": "nothing", "smdistributed": "modelparallel"}
# The arguments that AWS's scripts give.
CALLED = {
    "torch.sagemaker.init": "()",
    "torch.sagemaker.transform": "(0, config=None, load_state_dict_from_rank0=False, cp_comm_type='p2p')",
    "torch.sagemaker.moe.moe_config.MoEConfig": "(smp_moe=True, random_seed=1, moe_load_balancing='sinkhorn', "
    "global_token_shuffle=False, moe_all_to_all_dispatcher=True, use_cpu_initialization=False)",
    "torch.sagemaker.grad_norm.clip_grad_norm_": "(0, 1.0)",
    "torch.sagemaker.logger.get_logger": "()",
    "torch.sagemaker.utils.utils.timeit": "(True, 'text', 0)",
    "torch.sagemaker.checkpoint.utils.limit_num_subdirs": "('dir', 2, sort_fn=len, regex='.*', log=True)",
    "torch.sagemaker.distributed.fsdp.checkpoint.save_model_checkpoint": "(0, 0, 'dir', 0, 0, log=True, optimizer=0, "
    "scheduler=0, extra_exports=None)",
    "torch.sagemaker.distributed.fsdp.checkpoint.load_model_checkpoint": "(0, 0, 'dir', 0, 0, log=True, optimizer=0, "
    "scheduler=0, extra_imports={})",
}


def outcome(statement: str) -> str | list[str]:
    """What a statement of a script does."""
    try:
        exec(statement, {})
        return "works"
    except UserError as error:
        return [kind.__name__ for kind in (ImportError, AttributeError) if isinstance(error, kind)] + [str(error)]


def _walk(file: pathlib.Path) -> None:
    """In a process of its own: it changes torch's names."""
    importlib.import_module("smp.sagemaker")
    result = {}
    for module, names in ((m, n) for table in (USED, REFUSED, UNKNOWN) for m, n in table.items()):
        where = importlib.import_module(module)
        for name in names.split():
            result[f"{module}.{name}"] = {
                "from": outcome(f"from {module} import {name}"),
                "import": outcome(f"import {module}.{name}") if name in ("nothing", "modelparallel") else None,
                "attribute": outcome(f"import {module}; {module}.{name}"),
                "hasattr": hasattr(where, name),
                "getattr": getattr(where, name, None) is not None,
            }
    for dotted, given in CALLED.items():
        signature = inspect.signature(found(dotted))  # noqa: F841
        eval(f"signature.bind{given}")
    assert importlib.util.find_spec("torch.sagemaker") and importlib.util.find_spec("smdistributed")  # as others ask
    assert torch.sagemaker.transform is smp.sagemaker.transform
    importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")
    file.write_text(json.dumps(result))


def test_every_name_of_awss_scripts_works_or_is_refused_as_python_expects(tmp_path):
    run_distributed(_walk, tmp_path / "found.json", world_size=1)
    result_of = json.loads((tmp_path / "found.json").read_text())
    page, notes = make_tables.names_page(), {row.original: row.note for row in NAMES}
    for module, names in USED.items():
        for name in names.split():
            assert f"`{module}.{name}`" in page
            assert result_of[f"{module}.{name}"] == {
                "from": "works", "import": None, "attribute": "works", "hasattr": True, "getattr": True,
            }  # fmt: skip
    for table in (REFUSED, UNKNOWN):
        for dotted in (f"{module}.{name}" for module, names in table.items() for name in names.split()):
            note = notes.get(dotted, "docs/smp_v2_names.md lists what replaces it")
            sentence = f"{dotted} is not here: {note}"
            assert (f"`{dotted}`" in page) == (dotted in notes) and (dotted in notes or dotted.endswith("nothing"))
            result = result_of[dotted]
            assert result["from"] == ["ImportError", sentence]
            assert result["import"] in (None, ["ImportError", sentence])
            assert result["attribute"] == ["AttributeError", sentence]
            assert not result["hasattr"] and not result["getattr"]


def _estimator(folder: str) -> None:
    """The order of calls and the arguments of a script of AWS's, with what its launcher sets."""
    import logging
    import warnings

    importlib.import_module("smp.sagemaker")
    import torch.sagemaker as tsm

    logging.getLogger("smp").setLevel(logging.INFO)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("smp").addHandler(handler)

    state = tsm.state
    assert (state.tensor_parallel_degree, state.cp_size, state.ep_size) == (1, 1, 1)
    assert (state.tp_rank, state.cp_rank, state.ep_rank) == (0, 0, 0)
    with pytest.raises(UserError, match=r"smp\.state needs a mesh"):
        _ = state.hybrid_shard_degree
    assert not hasattr(state, "rank") and not hasattr(state, "sm_activation_offloading")
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps({"tensor_parallel_degree": "2", "hybrid_shard_degree": 1})
    tsm.init()
    assert (state.tensor_parallel_degree, state.hybrid_shard_degree) == (2, 1)
    assert any("SM_HP_MP_PARAMETERS: {'tensor_parallel_degree': '2', 'hybrid_shard_degree': 1}" in t for t in said)
    assert any("sm_activation_offloading is False unless it is given; in SMP v2 it was True" in t for t in said)
    state.tensor_parallel_degree = 2
    with pytest.raises(UserError, match=r"tensor_parallel_degree is 2 since smp\.init: give 1 to that"):
        state.tensor_parallel_degree = 1
    state.reset()
    assert not tsm.is_initialized() and state.tp_size == 1

    # As AWS's script resets the estimator's degrees by default.
    state.tensor_parallel_degree = state.context_parallel_degree = state.expert_parallel_degree = 1
    said.clear()
    tsm.init({"hybrid_shard_degree": 2, "sm_activation_offloading": "True"})
    assert (state.tp_size, state.hybrid_shard_degree, state.sm_activation_offloading) == (1, 1, True)
    assert "init: tensor_parallel_degree is 1, which was set on state, and not the estimator's 2" in said
    assert "init: hybrid_shard_degree is the estimator's 1, not 2" in said
    assert not any("unless it is given" in text for text in said)
    state.reset()

    for parameters, sentence in (
        ("[1]", "is no JSON object such as"),
        ("{", "is no JSON object such as"),
        ('{"partitions": 2}', r"unknown key partitions: .*SM_HP_MP_PARAMETERS"),
        (
            '{"tensor_parallel_degree": "x"}',
            r"smp\.init: tensor_parallel_degree must be an integer, got 'x' \(SM_HP_MP",
        ),
        ('{"expert_parallel_degree": 3}', r"smp\.init: expert_parallel_degree 3 does not divide"),
    ):
        os.environ["SM_HP_MP_PARAMETERS"] = parameters
        with pytest.raises(UserError, match=sentence):
            tsm.init()
    del os.environ["SM_HP_MP_PARAMETERS"]
    state.tensor_parallel_degree = 2
    with pytest.raises(UserError, match=r"tensor_parallel_degree is 1, and smp\.state\.\w+ was set to 2"):
        tsm.init({"tensor_parallel_degree": 1})
    assert tsm.init() is not None and state.tp_size == 2  # what was set, it takes
    state.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _train_save_and_resume(pathlib.Path(folder))
    dist.barrier()


def _loop(model, optimizer, scheduler, steps: range) -> list[float]:
    from torch.sagemaker.grad_norm import clip_grad_norm_

    losses = []
    for step in steps:
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, attention_mask=None, labels=ids)["loss"]
        loss.backward()
        losses.append([loss.item(), clip_grad_norm_(model, 1.0).item()])
        optimizer.step()
        scheduler.step()
    return losses


def _wrapped():
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
    from torch.sagemaker.utils import utils as tsm_utils
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    model = tsm.transform(model, config=None, load_state_dict_from_rank0=False, cp_comm_type="p2p")
    initer = DelayedParamIniter(model)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    with initer.validate_params_and_buffers_inited(), tsm_utils.timeit(True, "FSDP constructor", dist.get_rank()):
        model = FSDP(
            model,
            auto_wrap_policy=policy,
            mixed_precision=MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=1,
            limit_all_gathers=1,
            device_id=torch.device("cpu"),
            use_orig_params=1,
            param_init_fn=initer.get_param_init_fn(),
            post_param_init_fn=initer.get_post_param_init_fn(),
            sync_module_states=0,
        )
    assert isinstance(model, FSDP) and len(FSDP.fsdp_modules(model)) == 3
    decay = [p for n, p in model.named_parameters() if "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer)


def _train_save_and_resume(folder: pathlib.Path) -> None:
    """By its own utility; with torch's functions: see ``test_smp_v2_script.py``."""
    import torch.sagemaker as tsm
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as TorchFSDP
    from torch.sagemaker.distributed.fsdp import checkpoint as util

    tsm.init({"hybrid_shard_degree": 0})
    kind, path = StateDictType.SHARDED_STATE_DICT, str(folder / "2steps")
    model, optimizer, scheduler = _wrapped()
    _loop(model, optimizer, scheduler, range(2))
    group = model.process_group
    saved = {"total_steps": 2, "resume_from_sequence_number": 8}
    rest = {"optimizer": optimizer, "scheduler": scheduler, "log": dist.get_rank() == 0}
    util.save_model_checkpoint(model, kind, path, "full_shard", (group, 0, True), **rest, extra_exports=saved)
    expected = _loop(model, optimizer, scheduler, range(2, 4))

    model, optimizer, scheduler = _wrapped()
    rest = {"optimizer": optimizer, "scheduler": scheduler, "log": False}
    loaded = util.load_model_checkpoint(
        model, kind, path, "full_shard", (group, 0, True), **rest, extra_imports=dict.fromkeys(saved, 0)
    )
    assert loaded[util.EXPORT_KEY_IDENTITY] == {"epoch": 0, **saved} and loaded[util.EXPORT_KEY_MODEL] is model
    assert loaded[util.EXPORT_KEY_OPTIMIZER] is optimizer and loaded[util.EXPORT_KEY_SCHEDULER] is scheduler
    assert _loop(model, optimizer, scheduler, range(2, 4)) == expected

    # SMP v2's argument, and torch's own functions for both kinds of FSDP.
    full = FullStateDictConfig(rank0_only=True, offload_to_cpu=True, translate_on_save=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
        assert bool(model.state_dict()) == (dist.get_rank() == 0)
    assert {"model.norm.weight", "lm_head.weight"} <= get_state_dict(model, optimizer)[0].keys()
    plain = TorchFSDP(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    assert not isinstance(plain, FSDP) and list(get_state_dict(plain, [])[0]) == ["weight", "bias"]


def test_a_script_in_the_manner_of_awss_reads_its_estimator_and_resumes(tmp_path):
    run_distributed(_estimator, str(tmp_path), world_size=2)


def _imported_before():
    import logging
    import sys
    import types

    script = types.ModuleType("script")
    script.FSDP = torch.distributed.fsdp.FullyShardedDataParallel
    sys.modules["script"] = script
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("smp").addHandler(handler)
    importlib.import_module("smp.sagemaker")
    import torch.sagemaker as tsm

    tsm.init()
    assert any(t.startswith("script has torch's own FullyShardedDataParallel, which it imported before") for t in said)


def test_a_script_that_has_imported_torchs_fsdp_before_is_told():
    run_distributed(_imported_before, world_size=1)
