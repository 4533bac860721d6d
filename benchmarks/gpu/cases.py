"""What is timed, the most valuable first."""

from __future__ import annotations

import dataclasses
from typing import Any

LLAMA, TINY = "llama3_8b", "llama_tiny"


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        kind: ``step``, which has a line of the table of steps, or ``measure``.
        method: of the worker.
        expected: seconds on one H100; it is not begun with less left.
        timeout: seconds after which it has failed.
        what: is measured, whatever the number of layers.
        documents: of a sample; 0: the sample is one.
        watch: count where the host waits for the device, and list the kernels, in steps that are not timed.
    """

    name: str
    kind: str
    method: str
    expected: float
    timeout: float
    layers: int = 1
    flags: str = ""
    what: str = ""
    steps: int = 5
    documents: int = 0
    watch: bool = False
    tiny: bool = False
    processes: int = 1

    def words(self) -> list[str]:
        """Return the job's flags."""
        model, length = (TINY, 64) if self.tiny else (LLAMA, 8192)
        sizes = f"--model {model} --num_layers {self.layers} --max_context_width {length} --train_batch_size 1"
        return f"{sizes} --use_synthetic_data 1 --sharding_strategy full_shard {self.flags}".split()


FULL, NONE = "--activation_checkpointing_mode full", "--activation_checkpointing 0"
SELECTIVE = "--activation_checkpointing_mode selective"


def _step(what: str, flags: str, layers: int, *, method: str = "step", **more: Any) -> Case:
    slow = "--compile 1" in flags or method == "parts"
    limits: dict[str, Any] = {"expected": 45.0, "timeout": 170.0} if slow else {"expected": 12.0, "timeout": 90.0}
    return Case(f"{what}, {layers} layers", "step", method, layers=layers, flags=flags, what=what, **limits | more)


def cases(*, tiny: bool) -> list[Case]:
    """Return what is timed on one GPU."""
    few, many, whole = (1, 2, 2) if tiny else (4, 6, 32)
    eager, compiled, fused = "--compile 0", "--compile 1", "--attn_implementation fused"
    adapters = "--lora_rank 16"
    chosen = f"{compiled} {SELECTIVE} {fused} --loss_chunk_tokens 4096 --expandable_segments 1"
    found = [
        Case("ceilings", "measure", "ceilings", 10.0, 60.0),
        _step("eager, full", f"{eager} {FULL}", few, watch=True),
        _step("plain loop", eager, few, method="plain", watch=True),
        _step("compiled, selective", f"{compiled} {SELECTIVE}", few, watch=True),
        _step("eager, full", f"{eager} {FULL}", many),
        _step("plain loop", eager, many, method="plain"),
        _step("compiled, selective", f"{compiled} {SELECTIVE}", many, expected=25.0),
        Case("attention", "measure", "attention", 12.0, 60.0),
        _step("eager, selective", f"{eager} {SELECTIVE}", few),
        _step("eager, none", f"{eager} {NONE}", few),
        _step("eager, full, fused", f"{eager} {FULL} {fused}", few),
        _step("compiled, selective, fused", f"{compiled} {SELECTIVE} {fused}", few),
        _step("eager, full, 8 documents", f"{eager} {FULL}", few, documents=8),
        _step("eager, full, fused, 8 documents", f"{eager} {FULL} {fused}", few, documents=8),
        _step("compiled, none", f"{compiled} {NONE}", few),
        _step("torch's parts", compiled, few, method="parts"),
        _step("torch's parts", compiled, many, method="parts", expected=25.0),
        _step("eager, full, chunks of 4096", f"{eager} {FULL} --loss_chunk_tokens 4096", few),
        _step("adapters, eager, full", f"{eager} {FULL} {adapters}", whole, expected=30.0),
        _step("adapters, plain loop with peft", f"{eager} {adapters}", whole, method="plain", expected=30.0),
        _step("adapters, compiled, selective", f"{compiled} {SELECTIVE} {adapters}", whole),
        _step("eager, none", f"{eager} {NONE}", many),
        _step("eager, none, offloaded", f"{eager} {NONE} --offload_activations 1", many),
        _step("eager, full, expandable segments", f"{eager} {FULL} --expandable_segments 1", many),
        _step("eager, full, cpu_offload", f"{eager} {FULL} --cpu_offload 1", few, steps=2, expected=30.0),
        _step("eager, full, smddp", f"{eager} {FULL} --distributed_backend smddp", few),
        _step("what auto is", chosen, few, expected=25.0),
        _step("what auto is", chosen, many, expected=25.0),
        Case("asynchronous save", "measure", "save", 45.0, 120.0, flags=f"{eager} {FULL} --vocab_size 32000"),
        _step("compiled, full", f"{compiled} {FULL}", few),
    ]  # fmt: skip
    return [dataclasses.replace(case, tiny=tiny) for case in found]


def cases_of_several(processes: int, *, tiny: bool) -> list[Case]:
    """Return what is timed on several GPUs: the whole model, sharded over all, or split by tensor parallelism."""
    layers, tp = 2 if tiny else 32, f"--tensor_parallel_degree {processes}"
    ways = {"eager, full": f"--compile 0 {FULL}", "compiled, selective": f"--compile 1 {SELECTIVE}"}
    found = [_step(what, flags, layers) for what, flags in ways.items()]
    found += [_step("torch's parts", "--compile 1", layers, method="parts")]
    found += [_step(f"{what}, tp {processes}", f"{flags} {tp}", layers) for what, flags in ways.items()]
    limits = {"expected": 60.0, "timeout": 240.0, "processes": processes, "tiny": tiny}
    return [dataclasses.replace(case, **limits, name=f"{case.name}, {processes} GPUs") for case in found]
