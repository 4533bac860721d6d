"""Direct preference optimisation (DPO: Rafailov et al., arXiv:2305.18290): of two answers, to prefer the chosen one.

The reference is the model that training begins from, and there is no second model: with new adapters it is the policy
without them, else its log-probabilities have been computed before (:mod:`smp.train.reference`). Chosen and rejected
answer of a pair are consecutive documents of one sequence, or, where sequences are not packed, consecutive rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from smp.config import AUTO, LossConfig, Section, setting
from smp.data.config import DataConfig
from smp.loss import IGNORE_INDEX
from smp.models.model_config import ModelConfig
from smp.parallel import lora
from smp.parallel.documents import document_index
from smp.parallel.microbatch import Microbatch, to_device
from smp.parallel.parallelize import own_part
from smp.parallel.sequences import sum_over_ranks
from smp.parallel.technique import Setup
from smp.train.step import TokenLoss, forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Preferences between two answers (DPO)."""

    dpo: bool = setting(False, "Train on pairs of answers, the chosen one and the rejected one, by DPO.")
    dpo_beta: float = setting(0.1, "Strength of the pull to the reference model.", above=0.0)
    dpo_label_smoothing: float = setting(
        0.0, "Fraction of the pairs that is taken to be labelled wrongly.", minimum=0.0, maximum=0.5
    )
    dpo_loss: Literal["sigmoid", "ipo"] = setting(
        "sigmoid", "Loss of a pair: DPO's, or the squared one of IPO, of means over the answers' tokens."
    )

    def problems(self) -> list[str]:
        """Add settings of a loss that is not computed."""
        found = super().problems()
        if not self.dpo:
            found += [
                f"--{field.name} is of preferences: set --dpo 1, or leave it out"
                for field in dataclasses.fields(self)
                if getattr(self, field.name) != field.default
            ]
        elif self.dpo_loss == "ipo" and self.dpo_label_smoothing:
            found.append("--dpo_label_smoothing is of --dpo_loss sigmoid: leave one out")
        return found

    def keeps_reference(self, adapters: lora.Config) -> bool:
        """Return whether the reference cannot be computed from the policy, by leaving its adapters out."""
        return self.dpo and (
            not adapters.lora_rank or adapters.adapter_path is not None or bool(adapters.lora_modules_to_save)
        )

    def rows_of_sample(self, pack: bool | None) -> int:
        """Return how many rows of a micro-batch a sample is: a pair that ``--pack 0`` does not pack is two."""
        return 2 if self.dpo and pack is False else 1

    def misfits(self, data: DataConfig, loss: LossConfig, model: ModelConfig, adapters: lora.Config) -> list[str]:
        """Return one sentence for each setting of other sections that does not go with pairs."""
        found: list[str] = []
        if not self.dpo:
            return found
        if data.use_synthetic_data:
            found.append("--dpo 1 trains on pairs, and --use_synthetic_data 1 has none: set --training_dir instead")
        elif data.dataset_type not in (AUTO, "chat"):
            found.append(f"--dpo 1 reads pairs, not --dataset_type {data.dataset_type}: set --dataset_type chat")
        elif data.train_on not in ("auto", "completion"):
            found.append(f"--dpo 1 compares complete answers, not --train_on {data.train_on}: leave that out")
        return found + self.misfits_of_loss(loss, model, adapters)

    def misfits_of_loss(self, loss: LossConfig, model: ModelConfig, adapters: lora.Config) -> list[str]:
        """Return those of :meth:`misfits` that concern the loss and dropout, as for a plan, which needs no data."""
        found: list[str] = []
        if not self.dpo:
            return found
        if not loss.loss_chunk_tokens:
            found.append("--dpo 1 needs --loss_chunk_tokens above 0: leave that at its default")
        if loss.z_loss:
            found.append("--z_loss is added to the loss of tokens, and --dpo 1 has another: leave one out")
        found += [
            f"--dpo 1 trains without dropout, as TRL: leave --{name} out"
            for section, names in ((model, ("resid_pdrop", "attn_pdrop", "embd_pdrop")), (adapters, ("lora_dropout",)))
            for name in names
            if getattr(section, name)
        ]
        return found


def pair_losses(
    policy: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of pairs ``(pairs,)``, and their rewards ``(pairs, 2)``, as TRL's ``DPOTrainer``.

    Args:
        policy, reference: log-probabilities of the chosen and the rejected answer, ``(pairs, 2)``.
        tokens: of each, ``(pairs, 2)``.

    Source: of ``ipo``, Azar et al., arXiv:2310.12036, equation 17, with means over tokens, as TRL has them; of
    smoothing, which TRL's ``sigmoid`` has no more, Mitchell, A note on DPO with noisy preferences, equation 3.
    """
    ratios = policy - reference
    rewards = config.dpo_beta * ratios.detach()
    if config.dpo_loss == "ipo":
        means = ratios / tokens.clamp(min=1)
        return (means[:, 0] - means[:, 1] - 1 / (2 * config.dpo_beta)).square(), rewards
    scaled, smoothing = config.dpo_beta * (ratios[:, 0] - ratios[:, 1]), config.dpo_label_smoothing
    return -F.logsigmoid(scaled) * (1 - smoothing) - F.logsigmoid(-scaled) * smoothing, rewards


def number_pairs(microbatch: Microbatch) -> Microbatch:
    """Return a micro-batch with its answers numbered, 2n and 2n + 1 of a pair; padding, without a target, is none.

    Answers are its documents, or else its rows.
    """
    targets, bounds = microbatch["targets"], microbatch.get("document_bounds")
    if bounds is None:
        bounds = torch.arange(len(targets) + 1) * targets.shape[1]
    document = document_index(targets, bounds).long() - 1
    tokens = torch.bincount(document[targets != IGNORE_INDEX], minlength=len(bounds) - 1)
    answers = tokens > 0
    number = (answers.cumsum(0) - 1).clamp(min=0)
    found = tokens[answers]
    # Padding alone: one pair of no token, as every rank takes part in the step's collectives.
    numbered: Microbatch = {
        **microbatch,
        "sequences": number[document],
        "sequence_tokens": found if len(found) else found.new_zeros(2),
    }
    if "reference" in microbatch:  # rows past the end of the data, which have no target, are the last ones
        pairs, given = len(numbered["sequence_tokens"]) // 2, microbatch["reference"]
        numbered["reference"] = given[:pairs] if len(given) else given.new_zeros(pairs, 2)
    return numbered


class PairLoss(TokenLoss):
    """The loss of pairs, of which the mean over the global batch is minimised; metrics with TRL's names."""

    metrics = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")

    def __init__(self, setup: Setup):
        super().__init__(setup)
        self._config = setup.settings[Config]

    def own_part(self, microbatch: Microbatch) -> Microbatch:
        """Return what this rank computes, with the number of each token's answer."""
        numbered = number_pairs(microbatch)
        own = own_part(numbered, self.setup)
        return {**own, "reference": numbered["reference"]} if "reference" in numbered else own

    def count(self, microbatches: Sequence[Microbatch], device: torch.device) -> torch.Tensor:
        """Count pairs, once over the ranks of a sequence, and tokens, ``(2,)``."""
        answers = sum(int((each["sequence_tokens"] > 0).sum()) for each in microbatches)
        pairs = answers // 2 if self.setup.mesh.cp.rank == 0 else 0
        tokens = super().count(microbatches, device)
        return torch.stack([torch.full_like(tokens, pairs), tokens])

    def log_probs(self, model: nn.Module, microbatch: Microbatch, device: torch.device) -> torch.Tensor:
        """Return the log-probabilities of the answers of the pairs of :meth:`own_part`, ``(pairs, 2)``."""
        return sum_over_ranks(forward(model, microbatch, device).neg().view(-1, 2), self.setup.mesh.cp)

    def compute(
        self, model: nn.Module, microbatch: Microbatch, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses, and for the log those of losses and metrics, once over the ranks of a sequence.

        One all-reduce, over the ranks of a sequence: the loss is not linear in its tokens. The model stays in
        evaluation mode, without dropout, as TRL has it: blocks that backward recomputes are to be as they were.
        """
        model.eval()
        tokens = to_device(microbatch["sequence_tokens"], device).view(-1, 2)
        if "reference" in microbatch:
            policy, reference = self.log_probs(model, microbatch, device), to_device(microbatch["reference"], device)
        else:
            with torch.no_grad(), lora.left_out(model):
                base = forward(model, microbatch, device)
            both = torch.stack([forward(model, microbatch, device), base]).neg()
            policy, reference = sum_over_ranks(both, self.setup.mesh.cp).view(2, -1, 2)
        losses, rewards = pair_losses(policy, reference, tokens, self._config)
        real = (tokens > 0).all(1)
        loss = (losses * real).sum()
        chosen, rejected = rewards.unbind(1)
        of_pair = torch.stack([losses.detach(), chosen, rejected, chosen > rejected, chosen - rejected])
        sums = (of_pair * real).sum(1)
        return loss, sums if self.setup.mesh.cp.rank == 0 else torch.zeros_like(sums)


def loss_of(setup: Setup) -> TokenLoss:
    """Return what the job minimises, by its settings."""
    return PairLoss(setup) if setup.settings[Config].dpo else TokenLoss(setup)
