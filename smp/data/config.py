"""Settings of the data."""

from __future__ import annotations

import dataclasses
from typing import Literal

from smp.config import AUTO, Section, setting

Split = Literal["train", "validation"]
TrainOn = Literal["auto", "assistant", "completion", "all", "last"]
Overlong = Literal["cut", "drop", "refuse"]
OF_CHAT = ("train_on", "chat_template", "overlong", "pack", "show_masks", "max_samples")
NO_DATA = "no training data: set --training_dir or --dataset_name, or --use_synthetic_data 1 for random tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Sources of samples and their loading."""

    dataset_type: Literal["auto", "gpt_jsonl", "hf", "text", "chat"] = setting(
        AUTO,
        "Files to read: JSON lines; a saved Hugging Face dataset, parquet, Arrow or CSV; text; conversations in JSON "
        "lines or tables. auto: what is there.",
    )
    train_on: TrainOn = setting(
        AUTO,
        "Conversations: tokens to train on. auto: the assistant's turns, of prompt and completion the completion; "
        "last: the last turn.",
    )
    chat_template: str | None = setting(
        None,
        "Conversations: the chat template: a file in Jinja, a model's directory that has one, or chatml. Default: the "
        "tokenizer's.",
    )
    overlong: Overlong = setting("cut", "Conversations longer than --max_context_width: cut them there, drop, refuse.")
    pack: bool | None = setting(
        None,
        "Conversations: several in a sequence, which do not see each other. 0: one each, padded. Default: 1, and 0 "
        "for a model that does not keep them apart.",
    )
    show_masks: int = setting(0, "Print so many conversations at the start, with what is trained on marked.", minimum=0)
    max_samples: int | None = setting(None, "Train on the first so many conversations only.", minimum=2)
    validation_split: float = setting(
        0.0,
        "Fraction of the conversations, or of the sequences of other data, that is left out of training and validated "
        "on.",
        minimum=0.0,
        maximum=0.5,
    )
    dataset_name: str | None = setting(
        None, "Hugging Face dataset to train on, in the cache of `datasets` or on the hub, instead of --training_dir."
    )
    dataset_config_name: str | None = setting(None, "Configuration of --dataset_name. Default: its only one.")
    dataset_split: str | None = setting(
        None,
        "Split of --dataset_name to train on, or to evaluate with --evaluate_only 1. Default: train; without "
        "--test_dir validation reads another one.",
    )
    use_synthetic_data: bool = setting(False, "Train on random tokens; no data is read.")
    synthetic_samples: int = setting(100_000, "Samples per epoch of random tokens.", minimum=1, maximum=1 << 40)
    training_dir: str | None = setting(
        None, "Training data: a folder, a file, a glob, or a URL such as s3://bucket/folder."
    )
    test_dir: str | None = setting(None, "Validation data, as --training_dir.")
    zipped_data: bool | None = setting(
        None, "Which files of a folder to read: 1 only .gz, 0 only uncompressed. Default: both (SMP v2: only .gz)."
    )
    tokenizer_name_or_dir: str | None = setting(
        None, "Local tokenizer directory, for text and --document_mask 1. Default: the model directory's."
    )
    text_document_separator: str | None = setting(
        None, "Line that separates documents in a text file; '' is a blank line. Default: a file is one document."
    )
    data_cache_dir: str | None = setting(
        None, "Folder of the converted, memory-mapped token files. Default: ~/.cache/smp/tokens."
    )
    data_num_workers: int = setting(0, "Processes that prepare training batches. 0: the training process.", minimum=0)
    shuffle_data: bool = setting(
        True, "Visit the training samples in another order each epoch. 0: in the data's order, as SMP v2."
    )
    document_mask: bool = setting(
        False, "Keep packed documents apart: attention and positions restart after each end-of-sequence token."
    )
    validation_freq: int | None = setting(
        None, "Steps between validations; the first is before training. Default: none.", minimum=1
    )
    validation_batches: int | None = setting(
        None, "Batches per validation. Default: 10; with --evaluate_only 1 all.", minimum=1
    )
    val_batch_size: int = setting(4, "Validation samples per data rank and batch.", minimum=1)
    fast_validation: bool | None = setting(
        None, "Validate on the last file of --test_dir only. Default: 1; with --evaluate_only 1 0."
    )
    evaluate_only: bool = setting(
        False, "Print loss and perplexity of the model, or of --resume_from_checkpoint, on all of --test_dir, and stop."
    )

    @property
    def keeps_apart(self) -> bool:
        """Return whether packed documents are masked from each other, as packed conversations always are."""
        return self.pack is not False if self.is_chat else self.document_mask

    @property
    def is_chat(self) -> bool:
        """Return whether conversations are read."""
        return self.dataset_type == "chat" and not self.use_synthetic_data

    def of_conversations(self) -> list[str]:
        """Return the beginning of a sentence for each given setting that only conversations have."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [f"--{name} is for conversations" for name in OF_CHAT if getattr(self, name) != defaults[name]]

    def problems(self) -> list[str]:
        """Add settings that contradict each other."""
        found = super().problems()
        if self.use_synthetic_data:
            return found
        if self.dataset_type not in (AUTO, "chat"):
            found += [f"{each}: set --dataset_type chat, or leave it out" for each in self.of_conversations()]
        if self.validation_split and self.validation_freq is None and not self.evaluate_only:
            found.append(
                "--validation_split leaves out what nothing validates on: set --validation_freq, or leave it out"
            )
        elif self.validation_split and self.test_dir is not None:
            found.append("--validation_split and --test_dir both name the validation data: leave one out")
        if self.is_chat and self.pack is False and self.document_mask:
            found.append(
                "--document_mask 1 is of packed conversations, and --pack 0 has one in a sequence: leave one out"
            )
        if self.dataset_name is None:
            names = {"dataset_config_name": self.dataset_config_name, "dataset_split": self.dataset_split}
            found += [
                f"--{name} is of a dataset by name: set --dataset_name, or leave it out"
                for name in names
                if names[name]
            ]
        elif self.training_dir is not None:
            found.append("--training_dir and --dataset_name both name the training data: leave one out")
        elif self.dataset_type not in (AUTO, "hf", "chat"):
            found.append(f"--dataset_name is not read as --dataset_type {self.dataset_type}: leave that out")
        if self.dataset_type not in (AUTO, "text") and self.text_document_separator is not None:
            found.append(f"--text_document_separator is for text, not --dataset_type {self.dataset_type}: leave it out")
        return found

    def missing(self) -> list[str]:
        """Name data that is needed and not given, which hides no other problem."""
        found: list[str] = []
        if self.use_synthetic_data:
            return found
        if self.training_dir is None and self.dataset_name is None and not self.evaluate_only:
            found.append(NO_DATA)
        if (
            self.test_dir is None
            and self.dataset_name is None
            and not self.validation_split
            and (self.evaluate_only or self.validation_freq is not None)
        ):
            flag = "--evaluate_only 1" if self.evaluate_only else f"--validation_freq {self.validation_freq}"
            found.append(f"{flag} needs validation data: set --test_dir")
        return found
