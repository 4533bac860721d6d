"""What ``--document_mask 1`` separates: the documents that end with a token, counted in the beginning of the data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from smp.data.packing import BLOCK, RowSource, WindowRows
from smp.data.token_cache import IGNORED, Columns

SHARE = 0.01  # of the documents that may be without a token that is trained on
log = logging.getLogger("smp.data")


class _Counts(NamedTuple):
    """Numbers of rows, of the ends of documents inside of rows, of documents, and of those that no label trains on."""

    rows: int = 0
    inside: int = 0
    documents: int = 0
    untrained: int = 0


def tell_documents(source: RowSource, end: int, of_model: bool, *, what: str) -> None:
    """Log how many documents end with the token ``end``, and warn where it seems to be another than the data's.

    Args:
        of_model: it is the model's, not the tokenizer's.
    """
    stores: Sequence[Columns] = getattr(source, "stores", ())
    found, left = _Counts(), BLOCK
    for store in stores:
        found = _Counts(*map(sum, zip(found, _counted(store, end, left), strict=True)))
        left -= min(left, len(store.tokens))
    if not found.rows:
        return
    whose = f"token {end}, the {'model' if of_model else 'tokenizer'}'s eos_token_id"
    tokens = BLOCK - left
    if isinstance(source, WindowRows) and not found.inside:
        log.warning(
            "%s: --document_mask 1 separates nothing: in %d rows (%d tokens) no document ends with %s, before the row "
            "does; where another token ends them, give the data's tokenizer by --tokenizer_name_or_dir",
            what, found.rows, tokens, whose,
        )  # fmt: skip
        return
    log.info(
        "%s: documents end with %s: %d in %d rows or texts (%d tokens)", what, whose, found.documents, found.rows,
        tokens,
    )  # fmt: skip
    if found.untrained > SHARE * found.documents:
        log.warning(
            "%s: %d of these %d documents have no token that is trained on, and no answer sees them: where the token "
            "ends each turn of a conversation, --document_mask 0 shows the answers their questions",
            what, found.untrained, found.documents,
        )  # fmt: skip


def _counted(store: Columns, end: int, most: int) -> _Counts:
    """Count in the first ``most`` tokens; a document of one id alone is padding.

    What follows of a document that they cut may be trained on.
    """
    tokens = np.asarray(store.tokens[:most])
    starts = np.asarray(store.offsets[:-1])
    starts = starts[starts < len(tokens)]
    ends = tokens[:-1] == end
    if store.mask is not None:
        shown = np.asarray(store.mask[:most]).astype(bool)
        ends &= shown[:-1] & shown[1:]
    inside = np.setdiff1d(np.flatnonzero(ends) + 1, starts)
    bounds = np.union1d(starts, inside)
    if not len(bounds):
        return _Counts()
    differs = np.append(False, tokens[1:] != tokens[:-1])
    differs[bounds] = False
    real = np.logical_or.reduceat(differs, bounds)
    untrained = np.zeros_like(real)
    if store.labels is not None:
        untrained = real & ~np.logical_or.reduceat(np.asarray(store.labels[:most]) != IGNORED, bounds)
        untrained[-1] &= len(tokens) == len(store.tokens)
    return _Counts(len(starts), len(inside), int(real.sum()), int(untrained.sum()))
