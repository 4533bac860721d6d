"""Whether a type of causal language model trains in parallel as it does in one process: see docs/models.md."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import smp
from smp.data.data_pipeline import StepBatch
from smp.errors import UserError
from smp.models.attention_support import attention_misfit, default_attention
from smp.models.experts import expert_modules
from smp.models.registry import family_of
from smp.parallel.context import technique
from smp.parallel.context.fit import misfit
from smp.parallel.parallelize import fill_model, parallelize
from tests.distributed import run_distributed
from tests.reference import (
    Layout,
    Trajectory,
    global_batch,
    mean_loss,
    rank_batch,
    reference_trajectory,
    train_parallel,
)
from tests.zoo import tiny_config

STEPS, TOLERANCE = 3, 1e-9
SHARDED = Layout("full_shard", checkpointing=True)
SPLIT = Layout("full_shard", tp=2, checkpointing=True)
SEQUENCES = Layout("full_shard", cp=2, exchange="all_gather", checkpointing=True)


def _in_double(function: Any) -> Any:
    """Let a function of a tensor leave fp64 as it is where it is asked for fp32."""

    @functools.wraps(function)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float64:
            if function.__name__ == "float":
                return tensor
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        elif function.__name__ == "float" and not tensor.is_floating_point():
            return tensor.double()  # positions, which are multiplied with fp64
        return function(tensor, *args, **kwargs)

    return call


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Leave out the casts of fp64 tensors to fp32 that some of transformers' modules contain.

    fp32 would round what differs in the last bit of fp64 either up or down, on one side only.
    """
    with contextlib.ExitStack() as patches:
        for owner, name in (
            (torch.Tensor, "float"), (torch.Tensor, "to"), (torch.Tensor, "type"), (torch.Tensor, "softmax"),
            (torch.Tensor, "sum"), (torch, "sum"), (torch, "softmax"), (F, "softmax"), (F, "log_softmax"),
            (torch, "zeros_like"),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(owner, name, _in_double(getattr(owner, name))))
        patches.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        yield


class Reference(NamedTuple):
    """The plain model in fp64, and what training it in one process gives."""

    model: nn.Module
    expected: Trajectory


def build_plain(model_type: str, **changes: Any) -> nn.Module:
    """Build the plain model in fp32, with initial values by its own rules."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = tiny_config(model_type, **changes)
    config._experts_implementation = "eager"  # grouped products take no fp64
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def build_reference(model_type: str, *, loss_of: Callable = mean_loss, **changes: Any) -> Reference:
    """Build and train the plain model; zeros and ones among its values would hide what is left out."""
    model = build_plain(model_type, **changes).double().train()
    with torch.no_grad(), in_double():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        experts = [f"{path}.{name}" for path, module in expert_modules(model) for name, _ in module.named_parameters()]
        for name in experts:
            model.get_parameter(name).normal_(std=0.2)
    with in_double():
        reference = Reference(model, reference_trajectory(model, STEPS, loss_of))
    for name in experts:
        assert reference.expected.gradients[name].any(), f"the experts of {name} are never reached"
    family_of(model.config)  # derived once, in fp32, before the ranks are forked
    return reference


def assert_same_training(
    reference: Reference, layout: Layout, batch_of: Callable[[int, int, int, int], StepBatch] = rank_batch
) -> None:
    """Compare the losses of all steps, and every gradient of the first, with the plain model's; collective.

    A gradient that is zero but for rounding, as of a bias that softmax cancels, is compared with the others' size.
    """
    expected, config = reference.expected, reference.model.config
    # Asked for here, as the forward that it follows is of fp32.
    why = misfit(config) if layout.cp > 1 else None
    least = 1e-6 * max(float(gradient.norm()) for gradient in expected.gradients.values())
    with in_double(), mock.patch.object(technique, "misfit", lambda *args, **kwargs: why):
        steps = len(expected.losses)
        for step, (loss, _, gradients) in enumerate(train_parallel(reference.model, layout, steps, batch_of)):
            if step == 0:
                for name in gradients.keys() | expected.gradients.keys():
                    got, wanted = (of.get(name, torch.zeros(())) for of in (gradients, expected.gradients))
                    error = float((got - wanted).norm()) / max(float(wanted.norm()), least)
                    assert error <= TOLERANCE, f"the gradient of {name} differs by {error:.1e}"
            error = abs(loss - expected.losses[step]) / expected.losses[step]
            assert error <= TOLERANCE, f"the loss of step {step} differs by {error:.1e}"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard(model: nn.Module) -> nn.Module:
    mesh = SHARDED.mesh()
    activation = smp.ActivationConfig(activation_checkpointing=True)
    parallelize(
        model, family_of(model.config), mesh=mesh, parallel=SHARDED.parallel(), activation=activation, dtype=None
    )
    return model


def meta_model(hf_config: Any) -> nn.Module:
    """Build a model on the meta device, with the attention that transformers has chosen for the plain one.

    transformers 5.17 chooses sdpa where scores are capped, which sdpa leaves out.
    """
    name = hf_config._attn_implementation
    fits = attention_misfit(hf_config, name) is None
    return smp.meta_init(hf_config, attn_implementation=name if fits else default_attention(hf_config))


@torch.no_grad()
def assert_files_fit(reference: Reference, folder: str) -> None:
    """Read a checkpoint that transformers has written, and write one that it reads; collective."""
    from transformers import AutoModelForCausalLM

    theirs, ours = pathlib.Path(folder, "theirs"), pathlib.Path(folder, "ours")
    model = reference.model.eval()
    if dist.get_rank() == 0:
        model.save_pretrained(theirs)
    dist.barrier()
    read = _shard(meta_model(reference.model.config))
    fill_model(read, read.config, device=torch.device("cpu"), cpu_offload=False, seed=0, weights=theirs)
    values = dict(model.named_parameters())
    for name, parameter in read.named_parameters():
        assert torch.equal(_whole(parameter), values[name].float()), f"{name} of a checkpoint is read with other values"
    smp.export_hf(read, ours)
    if dist.get_rank() == 0:
        loaded, report = AutoModelForCausalLM.from_pretrained(
            ours, dtype=torch.float32, output_loading_info=True, experts_implementation="eager"
        )
        wrong = {key: sorted(names)[:3] for key, names in report.items() if names}
        assert not wrong, f"from_pretrained reports {wrong}"
        inputs, _ = global_batch(0)
        wanted, got = (one(input_ids=inputs, use_cache=False).logits for one in (model.float(), loaded.eval()))
        assert torch.equal(got, wanted), "the export has other logits"
    dist.barrier()


@torch.no_grad()
def assert_initial_values(reference: Reference, model_type: str) -> None:
    """Compare delayed initialisation with the model's own: constants, else spread; and buffers. Collective."""
    smp.init({})
    model, plain = smp.parallelize(meta_model(reference.model.config)), build_plain(model_type)
    got, wanted = dict(model.named_parameters()), dict(plain.named_parameters())
    assert got.keys() == wanted.keys(), f"parameters {sorted(got.keys() ^ wanted.keys())[:3]} are not in both"
    for name, parameter in wanted.items():
        value = _whole(got[name])
        if bool((parameter == parameter.flatten()[0]).all()):
            assert torch.equal(value, parameter), f"{name} begins with other values than the model's own rules give"
        else:
            ratio = float(value.std() / parameter.std())
            most = 1.1 * math.exp(6 / math.sqrt(2 * value.numel()))  # six times the error of the estimates
            assert 1 / most < ratio < most, f"{name} begins with {ratio:.2g} times the spread of the model's own rules"
    buffers = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer), f"buffer {name} begins with other values"


def _in_rank(folder: str, check: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run a check, and write down how it ends; a refusal is every rank's."""
    place = pathlib.Path(folder, f"outcome{dist.get_rank()}.json")
    try:
        check(*args)
        place.write_text(json.dumps(["works", ""]))
    except UserError as error:
        place.write_text(json.dumps(["refused", re.sub(r"/tmp/\S+: ", "", str(error))]))
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split()).removeprefix("AssertionError: ")
        place.write_text(json.dumps(["fails", text[:300]]))
        raise


def outcome(check: Callable[..., None], *args: Any, world_size: int = 2) -> list[str]:
    """Run a check on ranks; returns ``works``, ``refused`` or ``fails``, and why."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(AssertionError):
            run_distributed(_in_rank, folder, check, args, world_size=world_size, timeout=60, limit=110)
        found = [json.loads(file.read_text()) for file in sorted(pathlib.Path(folder).glob("outcome*.json"))]
    if len(found) < world_size and all(kind == "works" for kind, _ in found):
        return ["fails", "a rank ended without a word"]
    # A rank that fails breaks the connections of the other.
    return max(found, key=lambda one: (one[0] != "works", "onnect" not in one[1]))


def _split_outcome(reference: Reference) -> list[str]:
    family: Any = family_of(reference.model.config)
    if family.tensor_plan is None:
        return ["refused", family.no_tensor_plan]
    return outcome(assert_same_training, reference, SPLIT)


def _context_outcome(reference: Reference) -> list[str]:
    why = misfit(reference.model.config)
    return ["refused", why] if why else outcome(assert_same_training, reference, SEQUENCES)


def check_type(model_type: str) -> dict[str, Any]:
    """Return how each part of the training of a type ends."""
    result: dict[str, Any] = {"type": model_type}
    try:
        family_of(tiny_config(model_type))
    except UserError as error:
        return result | {"family": ["refused", str(error)]}
    result["family"] = ["works", ""]
    reference = build_reference(model_type)
    result["shard"] = outcome(assert_same_training, reference, SHARDED)
    result["tp"] = _split_outcome(reference)
    result["context"] = _context_outcome(reference)
    with tempfile.TemporaryDirectory() as folder:
        result["files"] = outcome(assert_files_fit, reference, folder)
    result["init"] = outcome(assert_initial_values, reference, model_type)
    return result
