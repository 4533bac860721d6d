"""What of a published family holds, of a small model with its structure: see docs/models.md."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import smp.cli
from smp.data.config import DataConfig
from smp.data.data_pipeline import BatchShape, open_samples
from smp.errors import UserError
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import build_model, family_of
from smp.models.text_part import PartNames, names_in
from smp.pretrained import load_pretrained_
from tests import family_files
from tests.families import FAMILIES, VOCABULARY, Family
from tests.job import losses, run_job
from tests.model_checks import STEPS, Reference, assert_same_training, in_double, outcome
from tests.reference import Layout, global_batch, reference_trajectory

PARTS = {
    "read": "directory read",
    "one": "1 rank",
    "two": "2 ranks",
    "chats": "chats",
    "lora": "LoRA",
    "export": "export",
    "others": "other tensors",
    "image": "image",
    "peft": "peft",
}
SAMPLE = pathlib.Path(__file__).parents[1] / "data" / "sample"
LENGTH = 64
TURNS = [{"role": "user", "content": "Who was it?"}, {"role": "assistant", "content": "Emma, she said."}]


@dataclasses.dataclass
class Checked:
    """A family's directory, and what is read and trained of it.

    Attributes:
        family: which.
        folder: for files; ``pretrained`` is the directory.
    """

    family: Family
    folder: pathlib.Path

    @property
    def directory(self) -> pathlib.Path:
        return self.folder / "pretrained"

    @functools.cached_property
    def reference(self) -> nn.Module:
        """transformers' model of the directory."""
        return family_files.load(self.family, self.directory).eval()

    @functools.cached_property
    def text(self) -> nn.Module:
        """The model that is trained."""
        return self.read()

    @functools.cached_property
    def fp64(self) -> Reference:
        """The model that is trained, and what training transformers' model of the directory in one process gives."""
        there = {self.name_there(name): name for name, _ in self.text.named_parameters()}
        model = family_files.load(self.family, self.directory).double()
        with in_double():
            expected = reference_trajectory(model, STEPS, functools.partial(_mean_loss, self.family))
        expected.gradients = {there[name]: gradient for name, gradient in expected.gradients.items()}
        return Reference(self.read().double(), expected)

    def read(self) -> nn.Module:
        """Read the model that is trained from the directory, as the job does."""
        model = resolve_model(ModelConfig(hf_pretrained_model_name_or_dir=str(self.directory)))
        model.hf_config._experts_implementation = "eager"  # grouped products take no fp64
        text = build_model(model.hf_config, attn_implementation=None)
        load_pretrained_(text, self.directory, hf_config=model.hf_config)
        return text.eval()

    def name_there(self, name: str) -> str:
        """Return the name in transformers' model of a parameter of the model that is trained."""
        names = names_in(self.directory, family_of(self.text.config))
        return names.in_whole(name) if isinstance(names, PartNames) else name

    def logits(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(**inputs, use_cache=False).logits

    def text_logits(self, model: nn.Module) -> torch.Tensor:
        return self.logits(model, family_files.text_inputs(self.family, torch.arange(3, 33)[None]))

    @functools.cached_property
    def samples(self) -> list[tuple[torch.Tensor, ...]]:
        """Tokens and labels ``(1, length)`` of the conversations that the jobs are trained on."""
        data = self.folder / "chats.jsonl"
        lines = [json.dumps({"messages": TURNS * turns}) + "\n" for turns in (1, 2, 1, 3)]
        data.write_text("".join(lines))
        batch = BatchShape(
            sequence_length=LENGTH, vocab_size=VOCABULARY, global_batch_size=4, micro_batch_size=2,
            data_rank=0, data_size=1, seed=0,
        )  # fmt: skip
        source = open_samples(DataConfig(**self.data, pack=False), split="train", batch=batch)
        samples = [source.sample(number) for number in range(4)]
        return [tuple(torch.from_numpy(c.astype("int64"))[None] for c in sample[:2]) for sample in samples]

    @property
    def data(self) -> dict[str, str]:
        return {
            "dataset_type": "chat", "training_dir": str(self.folder / "chats.jsonl"),
            "data_cache_dir": str(self.folder / "cache"), "tokenizer_name_or_dir": str(SAMPLE / "tokenizer"),
            "chat_template": str(SAMPLE / "chat_template.jinja"),
        }  # fmt: skip

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss of the conversations, each alone."""
        total, count = 0.0, 0
        for ids, labels in self.samples:
            logits = self.logits(model, family_files.text_inputs(self.family, ids))[0, :-1]
            total += F.cross_entropy(logits.float(), labels[0, 1:], reduction="sum").item()
            count += int((labels[0, 1:] != -100).sum())
        return total / count

    def job(self, name: str, *more: object) -> pathlib.Path:
        """Run a job of three steps and two ranks on the conversations; returns its directory."""
        expected, run = self.loss(self.reference), self.folder / name
        assert not run.exists(), "its job has failed"
        words = [word for flag, value in self.data.items() for word in (f"--{flag}", value)]
        words += ["--expert_parallel_degree", 2] if self.family.experts else []
        done = run_job(
            *words, "--pack", 0, "--hf_pretrained_model_name_or_dir", self.directory, "--max_context_width", LENGTH,
            "--output_dir", run, "--train_batch_size", 2, "--max_steps", 3, "--lr", 0.003, "--save_final_model", 1,
            "--checkpoint_freq", 2, *more, world_size=2,
        )  # fmt: skip
        if 2 in done.statuses:
            raise UserError(done.output.strip().splitlines()[-1])
        assert set(done.statuses) == {0}, done.output[-300:]
        first, second, _ = losses(run)
        assert math.isclose(first, expected, rel_tol=1e-5), f"the first loss is {first:.7g}, not {expected:.7g}"
        assert second != first, "nothing is trained"
        return run

    @functools.cached_property
    def finetuned(self) -> pathlib.Path:
        return self.job("finetuned")

    @functools.cached_property
    def adapted(self) -> pathlib.Path:
        return self.job("adapted", "--lora_rank", 2, "--save_merged_model", 0, "--lr", 0.01)

    @functools.cached_property
    def merged(self) -> nn.Module:
        """transformers' model of the directory with the adapters added."""
        words = ["export", str(self.adapted / "checkpoints/latest"), str(self.folder / "merged"), "--merge"]
        assert smp.cli.main(words) == 0
        return family_files.load(self.family, self.folder / "merged")


def check_read(checked: Checked) -> None:
    """Compare every parameter that is read, and the logits of text, with transformers'."""
    values = dict(checked.reference.named_parameters())
    for name, parameter in checked.text.named_parameters():
        assert torch.equal(parameter, values[checked.name_there(name)]), f"{name} is read with other values"
    got, wanted = checked.text_logits(checked.text), checked.text_logits(checked.reference)
    assert torch.equal(got, wanted), f"logits differ by {(got - wanted).abs().max():.1e}"


def _mean_loss(family: Family, model: nn.Module, step: int) -> torch.Tensor:
    inputs, labels = global_batch(step)
    logits = model(**family_files.text_inputs(family, inputs), use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def check_training(ranks: int, checked: Checked) -> None:
    """Compare three losses and every gradient with transformers' in one process, to 1e-9 in fp64."""
    layout = Layout("full_shard", ep=ranks if checked.family.experts else 1, checkpointing=True)
    kind, why = outcome(assert_same_training, checked.fp64, layout, world_size=ranks)
    if kind != "works":
        raise UserError(why) if kind == "refused" else AssertionError(why)


def check_chats(checked: Checked) -> None:
    """Finetune on conversations, with every parameter: the values after two updates have the third step's loss."""
    (checkpoint,) = (checked.finetuned / "checkpoints").glob("*-2steps")
    assert smp.cli.main(["export", str(checkpoint), str(checked.folder / "second")]) == 0
    found = checked.loss(family_files.load(checked.family, checked.folder / "second"))
    wanted = losses(checked.finetuned)[2]
    assert math.isclose(found, wanted, rel_tol=1e-5), f"the third loss is {wanted:.7g}, not {found:.7g}"


def check_lora(checked: Checked) -> None:
    """Finetune adapters on conversations."""
    assert (checked.adapted / "final/adapter_model.safetensors").is_file()


def check_export(checked: Checked) -> None:
    """Load what the finetuning has written."""
    _, report = family_files.load(checked.family, checked.finetuned / "final", output_loading_info=True)
    wrong = {key: sorted(names)[:3] for key, names in report.items() if names}
    assert not wrong, f"from_pretrained reports {wrong}"


def check_others(checked: Checked) -> None:
    """Compare the tensors of the files that are not of the model that is trained."""
    names = names_in(checked.directory, family_of(checked.text.config))
    before, after = (load_file(d / "model.safetensors") for d in (checked.directory, checked.finetuned / "final"))
    scales = {key: value for key, value in before.items() if key.endswith("_scale_inv")}
    others = {
        key: tensor
        for key, tensor in before.items()
        if key not in scales and (names.passes(key) or checked.family.predicts(key))
    }
    gone = sorted(others.keys() - after.keys())
    assert others and not gone, f"left out: {', '.join(gone[:3])}"
    for key, tensor in others.items():
        if f"{key}_scale_inv" in scales:
            tensor = Fp8Dequantize(None)._dequantize_one(tensor, scales[f"{key}_scale_inv"], torch.bfloat16)
        assert tensor.dtype == after[key].dtype and torch.equal(tensor, after[key]), f"changed: {key}"


def check_peft(checked: Checked) -> None:
    """Load the adapters by peft beside transformers' model of the directory."""
    # Computed in fp64, as that of twelve layers in fp32 differs by more than the merged weights do.
    got, wanted = (checked.text_logits(each.double()) for each in (_by_peft(checked), copy.deepcopy(checked.merged)))
    assert not torch.allclose(wanted.float(), checked.text_logits(checked.reference), atol=1e-3), (
        "the adapters do nothing"
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def _by_peft(checked: Checked) -> Any:
    import peft

    base = family_files.load(checked.family, checked.directory)
    return peft.PeftModel.from_pretrained(base, checked.adapted / "final").eval()


def check_image(checked: Checked) -> None:
    """Compare the logits of text around an image with adapters of the text, merged and beside, and without."""
    inputs = family_files.image_inputs(checked.family)
    adapted = _by_peft(checked)
    wanted, got = checked.logits(adapted, inputs), checked.logits(checked.merged, inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    before = checked.logits(checked.reference, inputs)
    assert not torch.allclose(before, wanted, atol=1e-3), "the adapters do nothing"
    with adapted.disable_adapter():
        assert torch.equal(checked.logits(adapted, inputs), before), "logits without the adapters differ"
    features = {key: value for key, value in inputs.items() if key not in ("input_ids", *_OF_TOKENS)}
    with torch.no_grad():
        models: tuple[Any, ...] = (checked.reference, checked.merged)
        both = [model.get_image_features(**features) for model in models]
    one, other = (
        each.last_hidden_state if each.pooler_output is None else torch.cat([*each.pooler_output]) for each in both
    )
    assert torch.equal(one, other), "the image's features differ"


_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
CHECKS: dict[str, Callable[[Checked], None]] = {
    "one": functools.partial(check_training, 1),
    "two": functools.partial(check_training, 2),
    "chats": check_chats,
    "lora": check_lora,
    "export": check_export,
    "others": check_others,
    "image": check_image,
    "peft": check_peft,
}


def _outcome(check: Callable[[Checked], None], checked: Checked) -> list[str]:
    try:
        check(checked)
    except UserError as error:
        return ["refused", " ".join(str(error).split()).replace(f"{checked.directory}/", "")]
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split()).removeprefix("AssertionError: ")
        return ["fails", text.replace(str(checked.folder), "")[:300]]
    return ["works", ""]


def check_family(name: str) -> dict[str, Any]:
    """Return how each part of a family ends: ``works``, ``refused`` or ``fails``, and why; or that it has ``none``."""
    family = FAMILIES[name]
    left_out = {"image": not family.sees, "others": not family.sees and not family.mtp}
    with tempfile.TemporaryDirectory() as folder:
        checked = Checked(family, pathlib.Path(folder))
        family_files.save(family, checked.directory)
        result: dict[str, Any] = {"name": name, "read": _outcome(check_read, checked)}
        if result["read"][0] == "refused":
            return result | {part: ["refused", ""] for part in [*PARTS][1:]}
        for part in [*PARTS][1:]:
            result[part] = ["none", ""] if left_out.get(part) else _outcome(CHECKS[part], checked)
    return result
