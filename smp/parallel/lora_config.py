"""Settings of adapters, and of what is trained besides them."""

from __future__ import annotations

import dataclasses
import math
import pathlib

from smp.config import AUTO, Section, flag_text, setting
from smp.errors import UserError
from smp.parallel.adapter_config import ALL_LINEAR, read_settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Low-rank adapters."""

    lora_rank: int = setting(
        0, "Rank of low-rank adapters beside frozen linear layers. 0: none, every parameter is trained.", minimum=0,
        aliases=("peft_rank",),
    )  # fmt: skip
    lora_alpha: float = setting(16.0, "Adapters are scaled by this / --lora_rank.", above=0.0)
    lora_dropout: float = setting(0.0, "Dropout of the adapters' input.", minimum=0.0)
    lora_target_modules: tuple[str, ...] = setting(
        (ALL_LINEAR,), "Layers that get adapters, by the ends of their names. Default: all linear layers of blocks."
    )
    lora_target_parameters: tuple[str, ...] = setting(
        (),
        "Parameters with the matrices of all routed experts of a layer that get adapters, too, by the ends of their "
        "names, as experts.gate_up_proj experts.down_proj; with --lora_target_modules none these alone.",
    )
    lora_use_rslora: bool = setting(False, "Scale by --lora_alpha / the square root of --lora_rank.")
    qlora: bool = setting(
        False, "Store the weights of the blocks' linear layers in 4 bits (NF4), also while ranks gather them."
    )
    lora_train_tokens: tuple[str, ...] = setting(
        (),
        "Tokens, texts or ids, whose rows of the embedding and the head are trained beside the adapters. auto: those "
        "of the data that the pretrained weights have not learned.",
    )
    lora_modules_to_save: tuple[str, ...] = setting(
        (), "Modules that are trained as they are beside the adapters, by the ends of their names, as embed_tokens."
    )
    adapter_path: str | None = setting(
        None, "Start from an adapter in peft's format: a directory, which sets the flags above."
    )
    save_merged_model: bool | None = setting(
        None,
        "Write the final model with the adapters added to its weights, and not the adapters alone. Default: with "
        "--lora_target_parameters, as servers leave adapters of experts out.",
    )

    def problems(self) -> list[str]:
        """Add settings without adapters, and a dropout that leaves nothing."""
        found = super().problems()
        if self.lora_dropout >= 1:
            found.append(f"--lora_dropout must be less than 1, got {self.lora_dropout}")
        if not self.lora_rank and self.adapter_path is None:
            found += [
                f"--{field.name} is of adapters: set --lora_rank or --adapter_path, or leave it out"
                for field in dataclasses.fields(self)
                if getattr(self, field.name) != field.default
            ]
        if AUTO in self.lora_train_tokens and len(self.lora_train_tokens) > 1:
            found.append(f"--lora_train_tokens takes {AUTO} or tokens, got {' '.join(self.lora_train_tokens)}")
        return found

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the tokens whose rows are trained, ascending; of a plan, which knows no tokenizer, as many ids."""
        texts = [text for text in self.lora_train_tokens if text != AUTO]
        ids = {int(text) for text in texts if text.isdecimal()}
        others = (number for number in range(len(texts)) if number not in ids)
        return tuple(sorted([*ids, *(next(others) for text in texts if not text.isdecimal())]))

    @property
    def merges(self) -> bool:
        """Return whether the final model is the merged one."""
        return bool(
            self.with_adapter().lora_target_parameters if self.save_merged_model is None else self.save_merged_model
        )

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' product."""
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.lora_use_rslora else self.lora_rank)

    def with_adapter(self) -> Config:
        """Return the settings of ``--adapter_path``, or these.

        Raises:
            UserError: there is no adapter that can be read, or it is another than these settings ask for.
        """
        return self if self.adapter_path is None else _read_config(self, pathlib.Path(self.adapter_path).expanduser())


def _read_config(config: Config, folder: pathlib.Path) -> Config:
    theirs = read_settings(folder)
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    for name, value in theirs.items():
        own = getattr(config, name)
        asked = tuple(sorted(own)) if isinstance(own, tuple) else own
        if asked not in (defaults[name], value):
            given, its = flag_text(own), flag_text(value) or "none"
            raise UserError(f"--{name} {given} is not that of --adapter_path {folder}, {its}: leave it out")
    return dataclasses.replace(config, **theirs)
