"""The one entry to the data: :func:`create_data_pipeline`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from smp.data.chat import open_conversations
from smp.data.config import DataConfig, Split
from smp.data.documents import tell_documents
from smp.data.order import Order, Positions
from smp.data.packing import Collator, PackedRows, Row, RowSource, WindowRows
from smp.data.sampler import PADDING, dealt_positions, step_positions
from smp.data.samples import Choice, HeldOut, PackedSamples
from smp.data.source import find_split, open_rows
from smp.data.synthetic import SyntheticRows
from smp.data.text import TextTokenizer
from smp.errors import ConfigError, RunError, UserError
from smp.log import say
from smp.parallel.microbatch import Microbatch
from smp.processes import end_worker_with_job, worker_context

LOOKED_AT = 1 << 20  # tokens, for those that are used
FEWEST_WORKERS_ALLOWED = 8
NOT_SHARED = 3  # exit status of a data worker
WORKER_END_SECONDS = 0.2  # from the first sign of a worker's end to its status
log = logging.getLogger("smp.data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of the batches, and this rank's part of them.

    Attributes:
        sequence_length: tokens per sample.
        vocab_size: ids must be below it.
        global_batch_size: samples per optimizer step over all data ranks; need not divide.
        micro_batch_size: most samples per forward pass.
        data_rank, data_size: this data-parallel rank and their number.
        seed: of the order, and of random tokens; at least 0.
        pin_memory: put batches in page-locked memory, for faster copies to a GPU.
        eos_token_id: ends a document, for data without a tokenizer: the model's.
        left_padding_misfit: the settings that need every row's masked tokens behind the others, for the refusal of
            data with others; None: there are none.
        tokenizer_dir: of the model, for text without --tokenizer_name_or_dir.
        pairs: conversations are pairs of answers.
        fixed_width: the model computes otherwise where rows have more columns, so that all have ``sequence_length``.
    """

    sequence_length: int
    vocab_size: int
    global_batch_size: int
    micro_batch_size: int
    data_rank: int
    data_size: int
    seed: int
    pin_memory: bool = False
    eos_token_id: int | None = None
    tokenizer_dir: str | None = None
    left_padding_misfit: str | None = None
    pairs: bool = False
    fixed_width: bool = False


@dataclasses.dataclass
class StepBatch:
    """One rank's share of one optimizer step.

    Attributes:
        microbatches: their number is the same on every rank.
        sample_ids: (k,) int64, the stream positions this rank consumes, without padding rows, ascending.
    """

    microbatches: list[Microbatch]
    sample_ids: Tensor


@dataclasses.dataclass(frozen=True)
class _Microbatches(Dataset):
    """Map-style, with a whole micro-batch as the index.

    ``reference``: of each pair, in the order in which they are packed, ``(pairs, 2)``.
    """

    source: RowSource
    collate: Collator
    reference: Tensor | None = None

    def __getitem__(self, index: Positions) -> Microbatch:
        positions, samples = index
        # Padding rows are alone in their micro-batch.
        rows: list[Row | None] = [*self.source.rows(samples)] if len(samples) else [None]
        of_rows = np.repeat(positions, len(rows) // len(positions))
        found: Microbatch = {**self.collate(rows), "sample_ids": torch.from_numpy(of_rows)}
        if self.reference is not None:
            found["reference"] = self.reference[cast(PackedSamples, self.source).packed(samples)]
        return found


def _begin_worker(_worker: int) -> None:
    """Let a worker end with the training process, and when it cannot hand over a batch, which Python only prints."""
    end_worker_with_job()
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]


def _end_worker(error: Exception, _batch: object) -> None:
    say(f"error: a data worker process cannot put a batch into shared memory: {error}")
    os._exit(NOT_SHARED)


class DataPipeline:
    """Endless steps of data, from any position of the stream at once.

    Each ``iter()`` starts at the position of :meth:`seek`, 0 by default, and ends the previous iteration.

    Args:
        sort: give micro-batches rows of like lengths, where they differ: of a step, sorted over all ranks. Which
            samples a step has does not change.

    Attributes:
        samples_per_epoch: rows of the data; stream position g is in epoch ``g // samples_per_epoch``.
        fingerprint: changes with the data's files and their cutting into samples; a resumed run reports a change.
        digest: changes with the data's rows and their order; likewise.
    """

    def __init__(
        self,
        source: RowSource,
        collate: Collator,
        batch: BatchShape,
        *,
        shuffle: bool,
        workers: int,
        sort: bool = False,
    ):
        self.samples_per_epoch = len(source)
        identity = f"{source.fingerprint} {batch.sequence_length} {collate.document_end}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:20]
        self.digest = source.digest
        self._microbatches, self._batch = _Microbatches(source, collate), batch
        self._shuffle, self._workers, self._start = shuffle, workers, 0
        self._lengths = source.lengths() if sort else None
        self._steps: Iterator[StepBatch] | None = None

    def seek(self, sample: int, *, global_batch_size: int | None = None) -> None:
        """Go to a position of the stream: the number of samples that all ranks together have consumed.

        Args:
            global_batch_size: samples per step from there on; None: as before.
        """
        self.close()
        self._start = sample
        if global_batch_size is not None:
            self._batch = dataclasses.replace(self._batch, global_batch_size=global_batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps from the first until every row has been given."""
        return -(-self.samples_per_epoch // self._batch.global_batch_size)

    @property
    def samples(self) -> int:
        """Number of the conversations or pairs that the rows are packed of."""
        return len(cast(PackedSamples, self._microbatches.source).numbers)

    @property
    def end(self) -> int | None:
        """Return the token that ends what is trained on of conversations or pairs, where it is known."""
        return cast(PackedSamples, self._microbatches.source).end

    @property
    def keys(self) -> Tensor:
        """Return a hash of the tokens and labels of each conversation or pair, in the order of packing."""
        return torch.from_numpy(cast(PackedSamples, self._microbatches.source).keys)

    def tokens_used(self) -> np.ndarray:
        """Return the ids that the first rows have, of some million tokens, ascending."""
        source = self._microbatches.source
        rows = source.rows(np.arange(min(len(source), -(-LOOKED_AT // self._batch.sequence_length))))
        return np.unique(np.concatenate([row.tokens for row in rows]))

    def attach(self, reference: Tensor) -> None:
        """Let the micro-batches from the next iteration on have the ``reference`` of their pairs, ``(pairs, 2)``."""
        self._microbatches = dataclasses.replace(self._microbatches, reference=reference)

    def in_order(self, reference: Tensor) -> DataPipeline:
        """Return one with the rows in their own order, a micro-batch a step, and another ``reference``."""
        of, batch = self._microbatches, self._batch
        batch = dataclasses.replace(batch, global_batch_size=batch.micro_batch_size * batch.data_size)
        found = DataPipeline(of.source, of.collate, batch, shuffle=False, workers=0)
        found.attach(reference)
        return found

    def __iter__(self) -> Iterator[StepBatch]:
        self.close()
        self._steps = self._iterate()
        return self._steps

    def _loader(self, step: list[np.ndarray]) -> DataLoader:
        batch, workers = self._batch, self._workers
        source = self._microbatches.source
        order = Order(step, batch.global_batch_size, source, batch.seed, self._shuffle, self._start, self._lengths)
        return DataLoader(
            self._microbatches,
            sampler=order,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=worker_context(__name__) if workers else None,
            worker_init_fn=_begin_worker,
            prefetch_factor=2 * len(step) if workers else None,
            pin_memory=batch.pin_memory,
            # Starting an iteration draws a number, which must not come from dropout's generator.
            generator=torch.Generator(),
        )

    def _iterate(self) -> Iterator[StepBatch]:
        batch, microbatches = self._batch, []
        step = (step_positions if self._lengths is None else dealt_positions)(
            batch=batch.global_batch_size, micro=batch.micro_batch_size, rank=batch.data_rank, size=batch.data_size
        )
        for microbatch in self._served(self._loader(step)):
            microbatches.append(microbatch)
            if len(microbatches) == len(step):
                ids = torch.cat([each["sample_ids"] for each in microbatches])
                yield StepBatch(microbatches, ids[ids != PADDING].unique())
                microbatches = []

    @staticmethod
    def _served(loader: DataLoader) -> Iterator[Microbatch]:
        iterator = iter(loader)
        try:
            yield from iterator
        except (RuntimeError, OSError, EOFError) as error:
            time.sleep(WORKER_END_SECONDS)
            for worker in getattr(iterator, "_workers", []):
                if worker.exitcode == NOT_SHARED:
                    raise RunError(
                        "a data worker process could not put a batch into shared memory, for the reason above: "
                        "--data_num_workers 0 does without; a container's /dev/shm is enlarged by --shm-size"
                    ) from error
                if not worker.is_alive():
                    raise RuntimeError(
                        f"the data worker process {worker.pid} has ended (status {worker.exitcode}): killed by hand, "
                        f"or by the system for memory; --data_num_workers 0 does without"
                    ) from error
            raise

    def close(self) -> None:
        """End the running iteration and its worker processes."""
        if self._steps is not None:
            self._steps.close()  # type: ignore[attr-defined]
            self._steps = None


def create_data_pipeline(config: DataConfig, *, split: Split, batch: BatchShape) -> DataPipeline:
    """Open the data of one split.

    Every rank may call it at once; what has to be converted is converted by one process per cache folder. Validation
    data is read in its own order, by the training process.

    Raises:
        UserError: the data is missing, empty, malformed or does not fit the model; with file and line.
    """
    most = max(FEWEST_WORKERS_ALLOWED, os.cpu_count() or 1)
    if config.data_num_workers > most:
        raise UserError(
            f"--data_num_workers {config.data_num_workers} is more than this machine can use: at most {most} here; "
            f"0 to 4 are enough for most data"
        )
    source, eos = _open_source(config, split, batch)
    of_model = eos is None
    eos = batch.eos_token_id if eos is None else eos
    if len(source) == 0:
        raise UserError(f"the {split} data contains no tokens: nothing to train on")
    if config.document_mask and not config.is_chat and (eos is None or eos >= batch.vocab_size):
        ends = "the model's config names no one eos_token_id" if eos is None else f"{eos} is outside the vocabulary"
        raise UserError(
            f"--document_mask 1 needs to know which token ends a document, and {ends}: set --tokenizer_name_or_dir to "
            f"the tokenizer that made the data, or leave it at 0"
        )
    if config.document_mask and not config.is_chat and eos is not None:
        tell_documents(source, eos, of_model, what="training data" if split == "train" else "validation data")
    # Where documents are masked, positions say which tokens are padding.
    if batch.left_padding_misfit is not None and not config.keeps_apart and isinstance(source, WindowRows):
        source.refuse_left_padding(batch.left_padding_misfit)
    pad = eos if eos is not None and eos < batch.vocab_size else 0  # never in the loss
    collate = Collator(
        sequence_length=batch.sequence_length,
        pad_token_id=pad,
        document_end=eos if config.keeps_apart else None,
        fitted=config.is_chat and not config.keeps_apart and not batch.fixed_width,
    )
    train = split == "train"
    if config.validation_split and not (config.is_chat or config.use_synthetic_data):
        source = HeldOut(source, Choice(validation_split=config.validation_split, validation=not train))
    return DataPipeline(
        source,
        collate,
        batch,
        shuffle=config.shuffle_data and train,
        workers=config.data_num_workers if train else 0,
        sort=train and collate.fitted,  # a validation has one micro-batch a step
    )


def open_samples(config: DataConfig, *, split: Split, batch: BatchShape) -> PackedSamples:
    """Open the conversations, or pairs, of one split as packed; raises as :func:`create_data_pipeline`."""
    return cast(PackedSamples, _open_source(config, split, batch)[0])


def _open_source(config: DataConfig, split: Split, batch: BatchShape) -> tuple[RowSource, int | None]:
    """Open the rows of one split; returns them, and the id that ends a document where the source knows it."""
    length, vocab = batch.sequence_length, batch.vocab_size
    directory = config.tokenizer_name_or_dir or batch.tokenizer_dir

    @functools.cache
    def tokenizer() -> TextTokenizer:
        if directory is None:
            raise UserError(
                f"{found.path} is text: set --tokenizer_name_or_dir, a local tokenizer directory, to convert it"
            )
        return TextTokenizer(directory)

    eos = tokenizer().eos_token_id if config.document_mask and directory is not None else None
    if config.use_synthetic_data:
        if split == "train" and config.training_dir is not None:
            log.info("--use_synthetic_data 1: %s is not read", config.training_dir)
        rows = SyntheticRows(config.synthetic_samples, length, vocab_size=vocab, seed=batch.seed, stream=split)
        return rows, eos
    # A part of the training data is told of with that.
    found = find_split(config, split, tell=split == "train" or config.evaluate_only or not config.validation_split)
    if config.is_chat:
        words = tokenizer()
        words.require_below(vocab)
        what = "training data" if split == "train" else "validation data"
        chats = open_conversations(
            found, words, config, sequence_length=length, validation=split == "validation", what=what, pairs=batch.pairs
        )
        return chats, words.eos_token_id
    fast = not config.evaluate_only if config.fast_validation is None else config.fast_validation
    if split == "validation" and fast and not found.saved and not config.validation_split:
        found = dataclasses.replace(found, files=found.files[-1:])
    if misplaced := config.of_conversations():
        raise ConfigError([f"{each}, and the data has none: leave it out" for each in misplaced])
    source = open_rows(
        found,
        sequence_length=length,
        vocab_size=vocab,
        tokenizer=tokenizer,
        cache_dir=config.data_cache_dir,
        what="training data" if split == "train" else "validation data",
        separator=config.text_document_separator,
    )
    return source, eos if eos is not None or not isinstance(source, PackedRows) else tokenizer().eos_token_id
