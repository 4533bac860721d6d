"""Parameters that are not one tensor of safetensors files each: read in slices, written under the files' keys."""

import pathlib
from unittest import mock

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.hrm_text import HrmTextConfig
from transformers.models.mixtral import MixtralConfig

from smp.checkpoint.hf_export import export_hf
from smp.delayed_init import materialize_
from smp.errors import UserError
from smp.models.added import LOADED, remember_files
from smp.models.families import FAMILIES
from smp.models.family import Family
from smp.models.file_keys import Conversion
from smp.models.file_names import FileNames, Rename, file_names_of
from smp.models.registry import build_model
from smp.pretrained import base_dtypes, find_tensors, load_pretrained_, read_tensor
from tests import experts
from tests.distributed import run_distributed
from tests.unit.test_pretrained import _CountingFile, _CountingSlice

EXPERTS, WIDTH, INNER = 3, 6, 5
SHAPES = {
    "model.experts.gate_up_proj": (EXPERTS, 2 * INNER, WIDTH),
    "model.experts.down_proj": (EXPERTS, WIDTH, INNER),
    "model.attn.q.weight": (4, WIDTH),
    "model.attn.k.weight": (4, WIDTH),
    "model.mixer.weight": (WIDTH, 8),
    "model.joined.weight": (7, 2),
    "model.norm.weight": (WIDTH,),
}
NAMES = FileNames(
    to_module=(Rename(r"^net\.", "model."),),
    to_file=(Rename(r"^model\.", "net."),),
    conversions=(
        Conversion(("experts.*.w1.weight", "experts.*.w3.weight"), ("experts.gate_up_proj",), axis=1),
        Conversion(("experts.*.w2.weight",), ("experts.down_proj",)),
        Conversion(("attn.qk.weight",), ("attn.q.weight", "attn.k.weight")),
        Conversion(("mixer.weight",), ("mixer.weight",), transposed=(0, 1)),
        Conversion(("joined.a", "joined.b"), ("joined.weight",)),
    ),
    passed=(r"^vision\.",),
)


class MadeUpConfig(LlamaConfig):
    model_type = "made_up"


CONFIG = MadeUpConfig(num_hidden_layers=1, hidden_size=WIDTH, num_attention_heads=2)
FAMILY = Family(
    name="made_up", hf_model_type="made_up", architecture="MadeUpForCausalLM", base="model", blocks="model",
    embedding="model.embed", final_norm=None, head="head", gated_mlp=True, settings={}, defaults={}, file_names=NAMES,
)  # fmt: skip


class MadeUp(nn.Module):
    def __init__(self, fill=None):
        super().__init__()
        for name, shape in SHAPES.items():
            *path, own = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            values = torch.randn(shape) if fill is None else torch.full(shape, fill)
            module.register_parameter(own, nn.Parameter(values))


def in_files(model):
    """The tensors of the model's files, written out by hand."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gate_up, down = own["model.experts.gate_up_proj"], own["model.experts.down_proj"]
    found = {
        "net.attn.qk.weight": torch.cat([own["model.attn.q.weight"], own["model.attn.k.weight"]]),
        "net.mixer.weight": own["model.mixer.weight"].T,
        "net.joined.a": own["model.joined.weight"][:4],
        "net.joined.b": own["model.joined.weight"][4:],
        "net.norm.weight": own["model.norm.weight"],
        "vision.patch.weight": torch.arange(5),
        "vision.scale": torch.tensor(0.3, dtype=torch.bfloat16),
    }
    for index in range(EXPERTS):
        found[f"net.experts.{index}.w1.weight"] = gate_up[index, :INNER]
        found[f"net.experts.{index}.w3.weight"] = gate_up[index, INNER:]
        found[f"net.experts.{index}.w2.weight"] = down[index]
    return {key: tensor.clone().contiguous() for key, tensor in found.items()}


@pytest.fixture(autouse=True)
def made_up():
    with mock.patch.dict(FAMILIES, made_up=FAMILY):
        yield


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(1)
    model = MadeUp()
    (tmp_path / "in").mkdir()
    save_file(in_files(model), tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    return model, tmp_path / "in"


def assert_exported(directory, expected):
    found = {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.parametrize("most", [10, 100_000])
def test_pieces_are_read_and_exported_under_their_keys(tmp_path, saved, most):
    reference, directory = saved
    model = MadeUp(torch.nan)
    load_pretrained_(model, directory, hf_config=CONFIG)
    entries = find_tensors(model, directory, hf_config=CONFIG)
    for name, parameter in reference.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
        assert torch.equal(read_tensor(entries[name]), parameter), name
    remember_files(model, LOADED, directory)  # as smp.load_pretrained does
    reads = []
    values = dict(model.named_parameters())
    export_hf(model, tmp_path / "out", hf_config=CONFIG, max_shard_bytes=most)
    assert_exported(tmp_path / "out", in_files(reference))
    # By names, from weights that are given; a parameter of several tensors is read once, in several files, too.
    export_hf(
        values, tmp_path / "named", hf_config=CONFIG, max_shard_bytes=most, weights=directory,
        read=lambda name: reads.append(name) or values[name],
    )  # fmt: skip
    assert_exported(tmp_path / "named", in_files(reference))
    assert reads == list(SHAPES)


class _OpenedFile(_CountingFile):
    opened = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _OpenedFile.opened += 1

    def get_tensor(self, key):
        return self.inner.get_tensor(key)


def _load_and_export(folder, reference, expected):
    safetensors.safe_open = _OpenedFile  # in this process, which ends with the test
    mesh = init_device_mesh("cpu", (2,))
    for dim in (0, 1):  # whole pieces, and parts of each
        with torch.device("meta"):
            model = MadeUp()
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p, dim=dim: Shard(min(dim, p.ndim - 1)))
        materialize_(model, torch.device("cpu"))
        _CountingSlice.elements = _OpenedFile.opened = 0
        load_pretrained_(model, pathlib.Path(folder, "in"), hf_config=CONFIG)
        local = [parameter.to_local().numel() for parameter in model.parameters()]
        assert _CountingSlice.elements == sum(local)
        # Once for keys, once for shapes, and once for each parameter, not for each piece.
        assert _OpenedFile.opened == 2 + sum(map(bool, local))
        for name, parameter in reference.items():
            assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name
        out = pathlib.Path(folder, f"out{dim}")
        export_hf(model, out, hf_config=CONFIG, max_shard_bytes=400, weights=pathlib.Path(folder, "in"))
        assert_exported(out, expected)


def test_two_ranks_read_their_parts_of_pieces_and_export_them(tmp_path, saved):
    reference = {name: parameter.detach() for name, parameter in saved[0].named_parameters()}
    run_distributed(_load_and_export, str(tmp_path), reference, in_files(saved[0]), world_size=2)


def changed(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_files_may_have_as_one_tensor_what_others_have_in_pieces(saved):
    reference, directory = saved
    name, model = "model.experts.down_proj", MadeUp(torch.nan)
    fused = reference.get_parameter(name).detach()
    changed(directory, lambda tensors: tensors.update({"net.experts.down_proj": fused}))
    with pytest.raises(UserError, match=r"have model.experts.down_proj as one tensor and as several"):
        load_pretrained_(model, directory, hf_config=CONFIG)
    changed(directory, lambda tensors: [tensors.pop(f"net.experts.{index}.w2.weight") for index in range(EXPERTS)])
    load_pretrained_(model, directory, hf_config=CONFIG)
    assert torch.equal(model.get_parameter(name), fused)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("net.experts.1.w3.weight", None, r"the weights lack net.experts.1.w3.weight: they are of another model"),
        ("net.experts.3.w1.weight", torch.ones(INNER, WIDTH), r"no parameter for net.experts.3.w1.weight"),
        ("net.experts.1.w3.weight", torch.ones(2, WIDTH), r"net.experts.1.w3.weight \[2, 6\] instead of \[5, 6\]"),
        ("net.mixer.weight", torch.ones(WIDTH, 8), r"net.mixer.weight \[6, 8\] instead of \[8, 6\]"),
    ],
)
def test_pieces_that_do_not_fit_are_named(saved, key, value, words):
    model = MadeUp(torch.nan)
    changed(saved[1], lambda tensors: tensors.pop(key) if value is None else tensors.update({key: value}))
    with pytest.raises(UserError, match=words):
        load_pretrained_(model, saved[1], hf_config=CONFIG)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_dtypes_are_those_of_pieces_and_a_tensor_is_exported_by_all_its_parameters(tmp_path, saved):
    reference, directory = saved
    changed(directory, lambda tensors: [tensors.update({k: t.half()}) for k, t in tensors.items() if ".w1." in k])
    found = base_dtypes(dict(reference.named_parameters()), CONFIG, directory)
    assert found.keys() == SHAPES.keys()
    assert found["model.mixer.weight"] == found["model.attn.k.weight"] == torch.float32
    parameters = {"model.attn.q.weight": reference.get_parameter("model.attn.q.weight")}
    with pytest.raises(UserError, match=r"net.attn.qk.weight of the files is more than model.attn.q.weight"):
        export_hf(parameters, tmp_path / "out", hf_config=CONFIG, read=parameters.get)


SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
THEIRS = {
    "mixtral": MixtralConfig(**SMALL, num_hidden_layers=2, num_key_value_heads=1, num_local_experts=3),
    "hrm_text": HrmTextConfig(**SMALL, num_hidden_layers=2),
}


@pytest.mark.parametrize("case", THEIRS)
def test_conversions_of_transformers_are_those_that_it_writes_by(tmp_path, case):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(THEIRS[case])
    model.save_pretrained(tmp_path)
    names, saved, seen = file_names_of(model), load_file(tmp_path / "model.safetensors"), {}
    assert names.conversions and not names.problem
    for name, parameter in model.named_parameters():
        for row in names.keys(name, parameter.shape):
            assert row.shape == tuple(saved[row.key].shape)
            row.into(seen.setdefault(row.key, torch.full(row.shape, torch.nan)), row.of_parameter(parameter.detach()))
    assert seen.keys() == saved.keys()
    assert all(torch.equal(seen[key], tensor) for key, tensor in saved.items())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_read_from_files_of_both_forms_and_exported(tmp_path, kind, fused):
    model = experts.build(kind, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    if fused:  # a tensor for all experts of a layer, as some publish them
        save_file(model.state_dict(), tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    read = build_model(model.config, attn_implementation=None)
    load_pretrained_(read, tmp_path / "theirs", hf_config=model.config)
    export_hf(read, tmp_path / "ours")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
        assert torch.equal(loaded.state_dict()[name], tensor), name
