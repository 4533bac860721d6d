"""A training script as one writes it for SMP v2, on 1, 2 and 4 processes, against a plain loop in one process."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import checkpoint
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp.api import FullStateDictConfig, ShardedOptimStateDictConfig
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, set_seed
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from smp.compat.group_checkpoints import load_state_dict
from smp.delayed_init import initialize_
from smp.errors import UserError
from smp.models.meta_model import init_rules
from tests.distributed import run_distributed

SEED, SAMPLES, LENGTH, STEPS, SAVED = 11, 4, 16, 6, 3
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LAYOUTS = [
    (1, {}),
    pytest.param(2, {"tensor_parallel_degree": 2}, marks=pytest.mark.slow),
    (2, {"context_parallel_degree": 2}),
    pytest.param(4, {"hybrid_shard_degree": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, marks=pytest.mark.slow),
    (4, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
]
WITH_EXPERTS = [
    (2, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}),
    (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 4}),
    pytest.param(4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"expert_parallel_degree": 4, "context_parallel_degree": 2}, marks=pytest.mark.slow),
    (2, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
]
AUX, Z = 0.1, 0.01


def config(experts: bool = False) -> LlamaConfig | MixtralConfig:
    sizes = {"vocab_size": 64, "use_cache": False, "max_position_embeddings": LENGTH, **SIZES}
    if not experts:
        return LlamaConfig(**sizes)
    found = MixtralConfig(num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, **sizes)
    found._experts_implementation = "eager"  # grouped products take no fp64
    return found


def dtype_of(experts: bool) -> torch.dtype:
    return torch.float64 if experts else torch.float32  # Adam's first steps make a rounding of a small gradient large


def balance_of(model, logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The losses of a MoEConfig, of the logits of each layer's router."""
    aux = load_balancing_loss_func(logits, model.config.num_local_experts, model.config.num_experts_per_tok)
    return AUX * aux + Z * sum(each.logsumexp(-1).square().mean() for each in logits)


def rows(step: int) -> torch.Tensor:
    return torch.randint(0, 64, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def optimizer_of(model) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.2},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def pieces(rank: int, size: int) -> list[int]:
    """The columns of a rank, in SMP v2's cut."""
    part = LENGTH // (2 * size)
    return [column for piece in (rank, 2 * size - 1 - rank) for column in range(piece * part, (piece + 1) * part)]


@functools.cache
def plain(cp: int = 1, experts: bool = False) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Loss and norm of every step, and the final values; the loss is the mean of the ranks' means, as in SMP v2."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(config(experts), dtype=dtype_of(experts))
    initialize_(model, init_rules(config(experts), seed=SEED), seed=SEED)
    optimizer, scheduler = optimizer_of(model)
    found = []
    for step in range(STEPS):
        ids = rows(step)
        output = model(ids, **({"output_router_logits": True} if experts else {}))
        losses = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        own = [[column for column in pieces(rank, cp) if column < LENGTH - 1] for rank in range(cp)]
        loss = sum(losses[:, columns].mean() for columns in own) / cp
        if experts:
            loss = loss + balance_of(model, output.router_logits)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append([loss.item(), norm.item()])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}


def build(experts: bool = False):
    import torch.sagemaker as tsm
    from accelerate import init_empty_weights
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.moe.moe_config import MoEConfig
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
    from torch.sagemaker.utils import utils

    set_seed(SEED)
    with utils.timeit(True, "Model creation", dist.get_rank()), init_empty_weights():
        model = AutoModelForCausalLM.from_config(config(experts), dtype=dtype_of(experts))
    balance = MoEConfig(moe_load_balancing="aux_loss", moe_aux_loss_coeff=AUX, moe_z_loss_coeff=Z)
    model = tsm.transform(
        model, config=balance if experts else None, load_state_dict_from_rank0=False, cp_comm_type="p2p"
    )
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        model = FSDP(
            model,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer}),
            mixed_precision=MixedPrecision(param_dtype=dtype_of(experts), reduce_dtype=dtype_of(experts)),
            sharding_strategy=torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD,
            forward_prefetch=1,
            limit_all_gathers=1,
            device_id=torch.device("cpu"),
            use_orig_params=0,
            param_init_fn=initer.get_param_init_fn(),
            post_param_init_fn=initer.get_post_param_init_fn(),
            sync_module_states=0,
        )
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, TransformerLayer))
    return model, *optimizer_of(model)


def cut(ids: torch.Tensor) -> torch.Tensor:
    import torch.sagemaker as tsm

    return ids[:, pieces(tsm.state.cp_rank, tsm.state.cp_size)]


def mean(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(model, optimizer, scheduler, steps: range, folder: str) -> list[list[float]]:
    import torch.sagemaker as tsm
    from torch.sagemaker.grad_norm import clip_grad_norm_

    found, state = [], tsm.state
    shared = state.tensor_parallel_degree * state.context_parallel_degree
    rank, size = dist.get_rank() // shared, dist.get_world_size() // shared
    for step in steps:
        ids = cut(rows(step)[rank * SAMPLES // size : (rank + 1) * SAMPLES // size])
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, attention_mask=None, labels=ids)["loss"]
        loss.backward()
        norm = clip_grad_norm_(model, 0.5)
        optimizer.step()
        scheduler.step()
        found.append([mean(loss), norm.item()])
        if (step + 1) % SAVED == 0:
            save(model, optimizer, scheduler, folder, step + 1)
            model.eval()
            with torch.no_grad():
                assert model(input_ids=ids, labels=ids)["loss"] < loss
            model.train()
    return found


def group_of(model):
    import torch.sagemaker as tsm
    from torch.sagemaker.utils.process_group_utils import get_global_ranks

    return (
        model.process_group,
        min(get_global_ranks(model.process_group)),
        tsm.state.ranker.get_rep_rank(dist.get_rank()),
    )


def of_rank(folder: str) -> str:
    import torch.sagemaker as tsm

    if (degree := tsm.state.tensor_parallel_degree) > 1:
        folder = os.path.join(folder, f"tp{degree}-{tsm.state.tp_rank}")
    if (degree := tsm.state.expert_parallel_degree) > 1:
        folder = os.path.join(folder, f"ep{degree}-{tsm.state.ep_rank}")
    return folder


def save(model, optimizer, scheduler, folder: str, step: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
    from torch.sagemaker.checkpoint import utils

    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "scheduler": scheduler.state_dict(),
            "total_steps": step,
            "model_config": model.config,
        }
    group, coordinator, replica = group_of(model)
    if replica == 0:
        checkpoint.save_state_dict(
            state_dict=state,
            storage_writer=checkpoint.FileSystemWriter(of_rank(f"{folder}/llama_v2-{step}steps")),
            planner=checkpoint.DefaultSavePlanner(),
            process_group=group,
            coordinator_rank=coordinator,
        )
    dist.barrier()
    utils.limit_num_subdirs(
        folder, 2, sort_fn=utils.SORT_BY_LAST_INT, regex=r"^.*\d+steps$", log=dist.get_rank() == 0
    )  # fmt: skip


def load(model, optimizer, scheduler, folder: str) -> int:
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

    path, (group, coordinator, _) = of_rank(folder), group_of(model)
    config = ShardedOptimStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, optim_state_dict_config=config):
        state = {"model": model.state_dict(), "scheduler": scheduler.state_dict(), "total_steps": 0}
        checkpoint.load_state_dict(
            state_dict=state,
            storage_reader=checkpoint.FileSystemReader(path),
            process_group=group,
            coordinator_rank=coordinator,
            planner=checkpoint.DefaultLoadPlanner(),
        )
        model.load_state_dict(state["model"])
        scheduler.load_state_dict(state["scheduler"])
        saved = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"],
            optimizer_key="optimizer",
            storage_reader=checkpoint.FileSystemReader(path),
            process_group=group,
        )["optimizer"]
        saved = FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=saved)
        optimizer.load_state_dict(saved)
    return state["total_steps"]


def _script(folder: str, degrees: dict[str, int], wanted, values, experts: bool = False) -> None:
    warnings.simplefilter("ignore")
    importlib.import_module("smp.sagemaker")  # in a process of its own: it changes torch's names
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(degrees)
    sys.argv = ["train.py", "--checkpoint_type=local"]
    with pytest.raises(UserError, match="would fail at the first checkpoint: use --checkpoint_type sharded"):
        tsm.init()
    sys.argv = ["train.py", "--checkpoint_type", "sharded"]
    tsm.init()
    model, *rest = build(experts)
    found = train(model, *rest, range(STEPS), folder)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=0)
    assert sorted(os.listdir(folder)) == ["llama_v2-3steps", "llama_v2-6steps"]
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    ):
        final = model.state_dict()
    assert final or dist.get_rank() > 0
    for name, value in final.items():
        torch.testing.assert_close(value, values[name], rtol=1e-4, atol=1e-5)

    model, *rest = build(experts)
    done = load(model, *rest, f"{folder}/llama_v2-3steps")
    assert done == SAVED and train(model, *rest, range(done, STEPS), folder) == found[done:]
    if tsm.state.context_parallel_degree > 1:
        _uncut(model, experts)
    dist.barrier()


def _uncut(model, experts: bool) -> None:
    """Batches that are not cut: the same on all ranks of a sequence, or of another length, or with positions."""
    import torch.sagemaker as tsm

    torch.manual_seed(0)
    fresh = tsm.transform(AutoModelForCausalLM.from_config(config(experts)))
    with pytest.raises(UserError, match=r"gave the same tokens: call model\(\*\*smp\.shard_sequence\(\{'input_ids'"):
        fresh(input_ids=rows(0), labels=rows(0))
    with pytest.raises(UserError, match=r"part of a sequence has 3 tokens: make sequences a multiple of \d long"):
        model(input_ids=rows(0)[:, :3])
    with pytest.raises(UserError, match=r"leave position_ids out"):
        model(input_ids=cut(rows(0)), position_ids=rows(0))


@pytest.mark.parametrize(("world", "degrees"), LAYOUTS, ids=str)
def test_a_script_of_smp_v2_trains_saves_and_resumes_as_a_plain_loop_trains(tmp_path, world, degrees):
    wanted, values = plain(degrees.get("context_parallel_degree", 1))
    run_distributed(_script, str(tmp_path), degrees, wanted, values, world_size=world)


@pytest.mark.parametrize(("world", "degrees"), WITH_EXPERTS, ids=str)
def test_a_script_with_mixtral_trains_saves_and_resumes_as_a_plain_loop_trains(tmp_path, world, degrees):
    wanted, values = plain(degrees.get("context_parallel_degree", 1), experts=True)
    run_distributed(_script, str(tmp_path), degrees, wanted, values, True, world_size=world)


@pytest.mark.parametrize(
    ("saved", "asked", "degrees"), [("tp2-0", ".", (2, 1)), ("tp2-0", "tp4-1", (2, 4)), (".", "tp2-0", (1, 2))]
)
def test_folders_of_another_tensor_parallel_degree_are_refused(tmp_path, saved, asked, degrees):
    (tmp_path / saved).mkdir(exist_ok=True)
    (tmp_path / saved / ".metadata").touch()
    reader = checkpoint.FileSystemReader(tmp_path / asked)
    with pytest.raises(UserError, match="of tensor-parallel degree {}, and this job's is {}: resume".format(*degrees)):
        load_state_dict({}, reader)


def _fp8(uses: bool) -> None:
    import logging

    importlib.import_module("smp.sagemaker")
    import torch.sagemaker as tsm

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("smp").addHandler(handler)
    engine = types.ModuleType("transformer_engine.pytorch.fp8")
    engine.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: True)
    sys.modules["transformer_engine.pytorch.fp8"] = engine
    tsm.init()
    model = tsm.transform(LlamaForCausalLM(config()))
    if uses:
        model.add_module("own", type("Linear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch"})())
    for _ in range(2):
        model(rows(0))
    # What init logs besides is there or not, as the level of the logger was left by a test before.
    assert sum(text.startswith("fp8_autocast has no effect: no module") for text in said) == (0 if uses else 1)


@pytest.mark.parametrize("uses", [False, True])
def test_fp8_autocast_without_a_module_that_follows_it_is_told_once(uses):
    run_distributed(_fp8, uses, world_size=1)
