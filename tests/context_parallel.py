"""Training with sequences that are split over ranks, beside the plain Hugging Face model with each document alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from smp.data.data_pipeline import StepBatch
from smp.loss import shift_labels
from smp.parallel.offload import offload
from tests.distributed import run_distributed
from tests.reference import (
    VOCABULARY,
    Layout,
    Trajectory,
    reference_trajectory,
    relative,
    train_parallel,
)

STEPS, ROWS, HEADS, HIDDEN, BLOCKS, WINDOW = 3, 4, 8, 64, 2, 6
# Of each row: of one token, of an odd place, and none at all.
CUTS = ((5, 6, 17), (), (11,), (1, 2, 9, 20))
CP_COMM_TYPES = ["all_gather", "p2p", "all_to_all"]


def config_of(name: str, key_heads: int) -> Any:
    """A tiny configuration of eight heads."""
    from transformers import GPTNeoXConfig, LlamaConfig, MistralConfig

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS, "max_position_embeddings": 128,
    }  # fmt: skip
    if name == "gpt_neox":
        return GPTNeoXConfig(**common, tie_word_embeddings=False)
    if name == "mistral":
        return MistralConfig(**common, num_key_value_heads=key_heads, sliding_window=WINDOW)
    return LlamaConfig(**common, num_key_value_heads=key_heads, tie_word_embeddings=name == "llama_tied")


def build(config: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The plain model, the same on every rank, biases and norms included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # zeros and ones would hide what is left out
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def documents_of(row: int, length: int, cut: bool) -> list[slice]:
    """Columns of each document of a row."""
    places = [place for place in CUTS[row] if cut and place < length]
    return [slice(*pair) for pair in itertools.pairwise([0, *places, length])]


def rows_of(step: int, length: int, cut: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels ``(ROWS, length)`` of one step; parts of a sequence get very different numbers of labels."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator)
    labels = ids.clone()
    labels[0, :9] = -100
    labels[1, 3:] = -100
    for row in range(ROWS):
        for document in documents_of(row, length, cut):
            labels[row, document.start] = -100
    return ids, labels


def batch_of(step: int, rank: int, size: int, accumulation: int, *, length: int, cut: bool) -> StepBatch:
    """A data rank's rows, in micro-batches; where documents begin is told by bounds, or by positions alone."""
    ids, labels = rows_of(step, length, cut)
    own = np.array_split(np.arange(ROWS)[rank * ROWS // size : (rank + 1) * ROWS // size], accumulation)
    microbatches = []
    for rows in own:
        found = {"input_ids": ids[rows], "targets": shift_labels(labels[rows])}
        if cut:
            lengths = [d.stop - d.start for row in rows for d in documents_of(row, length, cut)]
            positions = torch.cat([torch.arange(each) for each in lengths])
            found["position_ids"] = positions.view(len(rows), length)
            if step % 2 == 0:
                found["document_bounds"] = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
                found["longest_document"] = max(lengths)
        microbatches.append(found)
    return StepBatch(microbatches, torch.arange(sum(map(len, own))))


def loss_apart(model: nn.Module, step: int, *, length: int, cut: bool, z_loss: float) -> torch.Tensor:
    """The mean loss of a step, with each document alone."""
    ids, labels = rows_of(step, length, cut)
    total, valid = torch.zeros((), dtype=torch.float64), 0
    for row in range(ROWS):
        for document in documents_of(row, length, cut):
            targets = labels[row, document][1:]
            if not (targets != -100).any():
                continue
            logits = model(input_ids=ids[row : row + 1, document], use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            total = total + z_loss * logits.logsumexp(-1).square()[targets != -100].sum()
            valid += int((targets != -100).sum())
    return total / valid


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its data and how it is laid over ranks."""

    layout: Layout
    model: str = "llama"
    key_heads: int = 2
    documents: bool = False
    length: int = 27
    backend: str = "smddp"
    world: int = 2

    @property
    def reference(self) -> tuple[nn.Module, Trajectory]:
        return _reference(self.model, self.key_heads, self.documents, self.length, self.layout.z_loss)


@functools.cache
def _reference(name: str, key_heads: int, cut: bool, length: int, z_loss: float) -> tuple[nn.Module, Trajectory]:
    model = build(config_of(name, key_heads))
    loss_of = functools.partial(loss_apart, length=length, cut=cut, z_loss=z_loss)
    return model, reference_trajectory(model, STEPS, loss_of)


def errors(case: Case) -> tuple[float, float]:
    """Worst relative error of the steps' losses, and of the first step's gradients; collective."""
    model, expected = case.reference
    give = functools.partial(batch_of, length=case.length, cut=case.documents)
    losses, gradients = [], []
    for step, (loss, _, found) in enumerate(train_parallel(model, case.layout, STEPS, give)):
        losses.append(abs(loss / expected.losses[step] - 1))
        if step == 0:
            assert found.keys() == expected.gradients.keys()
            gradients = [relative(found[name] - wanted, wanted) for name, wanted in expected.gradients.items()]
    return max(losses), max(gradients)


def _check_all(cases: list[Case], tolerance: float) -> None:
    offload.apply_activation_offload.__kwdefaults__["minimum_bytes"] = 1
    worst = (0.0, 0.0)
    for case in cases:
        found = errors(case)
        assert max(found) <= tolerance, (case, found)
        worst = max(worst[0], found[0]), max(worst[1], found[1])
    if dist.get_rank() == 0:
        print(f"{len(cases)} cases at {dist.get_world_size()} ranks: losses {worst[0]:.1e}, gradients {worst[1]:.1e}")


def assert_parity(cases: list[Case], tolerance: float = 1e-9) -> None:
    """Losses of three steps and every gradient of the first are the plain model's; prints the worst errors."""
    for case in cases:
        _ = case.reference  # before the ranks are forked
    for world, backend in sorted({(case.world, case.backend) for case in cases}):
        own = [case for case in cases if (case.world, case.backend) == (world, backend)]
        run_distributed(_check_all, own, tolerance, world_size=world, backend=backend)


Choice = dict[str, Any]


def pairwise(factors: dict[str, list], allowed: Callable[[Choice], bool], tries: int = 300) -> Iterator[Choice]:
    """Yield choices in which every two values of two factors meet, where they may; greedy, always the same ones."""
    draw = random.Random(1)
    names = list(factors)

    def pairs_of(choice: Choice) -> set[tuple[str, int, str, int]]:
        places = {name: factors[name].index(choice[name]) for name in names}
        return {(a, places[a], b, places[b]) for a, b in itertools.combinations(names, 2)}

    def complete(fixed: Choice) -> list[Choice]:
        made = [{name: draw.choice(values) for name, values in factors.items()} | fixed for _ in range(tries)]
        return [choice for choice in made if allowed(choice)]

    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    while left:
        a, i, b, j = min(left)
        found = complete({a: factors[a][i], b: factors[b][j]})
        if not found:  # never together
            left.remove((a, i, b, j))
            continue
        best = max(found, key=lambda choice: len(pairs_of(choice) & left))
        left -= pairs_of(best)
        yield best
