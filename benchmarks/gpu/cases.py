"""What is timed, in the order of what it decides."""

from __future__ import annotations

import dataclasses
from typing import Any

LLAMA, EXPERTS = "llama3_8b", "qwen3_30b_a3b"
TINY = {LLAMA: "llama_tiny", EXPERTS: "mixtral_tiny"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        kind: ``step``, which has a line of the table of steps, or ``measure``.
        method: of the worker.
        expected: seconds on one H100; it is not begun with less left.
        timeout: seconds after which it has failed.
        what: is measured, whatever the number of layers.
        turn: of a measurement that is repeated: its spread is shown.
        kernels: list the kernels of a step that is not timed.
        needs: packages and flags; without one of them the case is not here.
    """

    name: str
    kind: str
    method: str
    expected: float
    timeout: float
    model: str = LLAMA
    layers: int = 1
    length: int = 8192
    batch: int = 1
    accumulation: int = 1
    flags: str = ""
    what: str = ""
    steps: int = 5
    turn: int = 0
    kernels: bool = False
    needs: str = ""
    tiny: bool = False
    processes: int = 1

    def words(self) -> list[str]:
        """Return the job's flags; what they leave open is chosen as by a job."""
        model, length = (TINY[self.model], 64) if self.tiny else (self.model, self.length)
        sizes = f"--model {model} --num_layers {self.layers} --max_context_width {length}"
        batch = f"--train_batch_size {self.batch} --gradient_accumulation_steps {self.accumulation}"
        return f"{sizes} {batch} --use_synthetic_data 1 --sharding_strategy full_shard {self.flags}".split()


NONE, KEPT = "--activation_checkpointing 0", "--activation_checkpointing 1 --activation_checkpointing_mode"
FULL, SELECTIVE = f"{KEPT} full", f"{KEPT} selective"
DEFAULT, PARTS = "default", "torch's parts"


def _step(what: str, layers: int, flags: str = "", *, method: str = "step", **more: Any) -> Case:
    limits = {"expected": 10.0 if layers < 32 else 20.0, "timeout": 90.0} | more
    turn = f", turn {limits['turn']}" if "turn" in limits else ""
    return Case(f"{what}, {layers} layers{turn}", "step", method, layers=layers, flags=flags, what=what, **limits)


def cases(*, tiny: bool) -> list[Case]:
    """Return what is timed on one GPU."""
    one, few, whole = (1, 2, 2) if tiny else (1, 6, 32)
    long: dict[str, Any] = {"expected": 45.0, "timeout": 120.0}
    adapters, two = "--lora_rank 16", {"length": 4096, "batch": 2}
    found = [
        _step(DEFAULT, whole, steps=20, **long),
        _step("KempnerForge's 4 x 2 x 4096 tokens", whole, accumulation=4, steps=3, **two, **long),
        _step("adapters, selective", whole, f"{adapters} {SELECTIVE}"),
        _step("adapters, none", whole, f"{adapters} {NONE}"),
        _step("adapters, 2 x 4096, selective", whole, f"{adapters} {SELECTIVE}", **two),
        _step("adapters, 2 x 4096, none", whole, f"{adapters} {NONE}", **two),
    ]
    for turn in (1, 2, 3):
        more = {"turn": turn, "kernels": turn == 1, "steps": 10}
        found += [_step(DEFAULT, few, **more), _step(PARTS, few, method="parts", **more)]
    found += [
        Case("fp8: go or no-go", "measure", "fp8", 30.0, 100.0),
        *(
            _step(f"fp8, {recipe}", few, f"--fp8 1 --fp8_recipe {recipe}", needs="torchao --fp8_recipe", expected=20.0)
            for recipe in ("tensorwise", "rowwise_with_gw_hp")
        ),
        *(_step(f"loss in chunks of {chunk}", one, f"--loss_chunk_tokens {chunk}") for chunk in (1024, 4096, 8192)),
        _step("loss compiled", one, "--loss_chunk_tokens 8192 --compile_loss 1", needs="--compile_loss"),
        _step(PARTS, one, method="parts"),
        _step("default, bf16 moments", whole, "--optimizer_state_dtype bf16", **long),
        _step("experts of 30B-A3B", one, model=EXPERTS),
        _step("experts of 30B-A3B", 3, model=EXPERTS),
        Case("asynchronous save", "measure", "save", 45.0, 120.0, flags=f"--compile 0 {FULL} --vocab_size 32000"),
    ]  # fmt: skip
    # A tiny model is compiled for a CPU, which takes minutes.
    return [dataclasses.replace(case, tiny=True, timeout=5 * case.timeout) if tiny else case for case in found]


def cases_of_several(processes: int, *, tiny: bool) -> list[Case]:
    """Return what is timed on several GPUs: the whole model, sharded over all, or split by tensor parallelism."""
    layers, tp = 2 if tiny else 32, f"--tensor_parallel_degree {processes}"
    ways = {"eager, full": f"--compile 0 {FULL}", "compiled, selective": f"--compile 1 {SELECTIVE}"}
    found = [_step(what, layers, flags) for what, flags in ways.items()]
    found += [_step(PARTS, layers, method="parts")]
    found += [_step(f"{what}, tp {processes}", layers, f"{flags} {tp}") for what, flags in ways.items()]
    limits = {"expected": 60.0, "timeout": 240.0, "processes": processes, "tiny": tiny}
    return [dataclasses.replace(case, **limits, name=f"{case.name}, {processes} GPUs") for case in found]
