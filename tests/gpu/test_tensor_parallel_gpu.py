"""Tensor parallelism on GPUs: parity with the plain model, exchanges beside products."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import smp
from tests.reference import build_reference, global_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def _rank(rank: int, world: int, folder: str, settings: dict) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    smp.init({"tensor_parallel_degree": world, **settings})
    for name in ("llama_gqa", "gpt_neox"):
        reference = build_reference(name, torch.float64).cuda().train()
        model = smp.transform(copy.deepcopy(reference))
        ids, labels = (part.cuda() for part in global_batch(0))
        found = model(input_ids=ids, labels=labels)
        found.loss.backward()
        logits = reference(input_ids=ids).logits
        torch.testing.assert_close(found.logits.full_tensor(), logits, rtol=1e-9, atol=1e-9)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        for (key, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-8, atol=1e-10, msg=key)
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"sequence_parallel": False}, {"tp_overlap": True}], ids=str)
def test_parity(settings, tmp_path):
    mp.start_processes(_rank, args=(2, str(tmp_path), settings), nprocs=2, start_method="spawn")
