"""The digest of all bytes of pretrained weights: made once, kept, and never of other bytes than those it stands for."""

import copy
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from smp.models import full_digest
from smp.models.full_digest import FullDigest
from smp.models.weight_files import digest_of
from tests.clock import wait_until


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Of more bytes than are sampled."""
    monkeypatch.setattr(full_digest, "cache_folder", lambda name: tmp_path / "cache" / name)
    save_file({"a": torch.arange(1 << 19, dtype=torch.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def edit(weights):
    """Change a byte between two samples."""
    file = weights / "model.safetensors"
    with file.open("r+b") as content:
        content.seek(os.path.getsize(file) // 64 * 3 + (1 << 14) + 100)
        content.write(b"\x07")


def test_an_edit_between_the_samples_gives_another_one(weights):
    sampled, first = digest_of(weights), FullDigest(weights)
    assert first.value is None and first.find() and FullDigest(weights).value == first.value
    edit(weights)
    assert digest_of(weights) == sampled and FullDigest(weights).value is None
    assert FullDigest(weights).find() not in (None, first.value)


def test_what_changes_while_it_is_read_has_none(weights):
    """The model was filled from other bytes than those that are read now."""
    found = FullDigest(weights)
    edit(weights)
    assert found.find() is None and not (weights / "cache").exists()


def test_it_is_made_where_it_cannot_be_kept_and_copied_with_its_model(weights):
    (weights / "cache").write_text("no folder")
    found = FullDigest(weights)
    assert found.begin() and not found.begin()
    wait_until(lambda: found.value)
    assert FullDigest(weights).value is None and copy.deepcopy([found])[0].value == found.value
    assert pickle.loads(pickle.dumps(found)).value == found.value
