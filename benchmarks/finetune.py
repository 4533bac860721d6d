"""Step time and peak memory of LoRA finetuning, beside TRL's SFTTrainer with peft on FSDP2, on two CPU processes.

    pip install trl peft accelerate
    python -m benchmarks.finetune --output benchmarks/results/finetune.md
    python -m benchmarks.finetune --rounds 1 --steps 3 --layers 2    # a trial

Both train rank 16 on all linear layers of one Llama, in fp32, over gloo and over the backend that each takes by default
(smp's is smddp), on the same rows: every step sees all of them, so that the first loss must be the same. Rounds are
interleaved; each run is of fresh processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from benchmarks.pages import Bystanders, origin, publish

ROOT = Path(__file__).resolve().parents[1]
PROCESSES, WARMUP, RANK, LENGTH = 2, 2, 16, 256
NAMES = {"smp": "smp", "smp_gloo": "smp over gloo", "trl": "TRL, peft, FSDP2"}


def _report(folder: Path, seconds: list[float], losses: list[float]) -> None:
    """Write what this process saw; the first of two processes has the times."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rank = os.environ["RANK"]
    (folder / f"{rank}.json").write_text(json.dumps({"seconds": seconds, "losses": losses, "peak_mib": peak}))


def train_smp(folder: Path, base: Path, data: Path, *, steps: int, rows: int, backend: str) -> None:
    """Run the job; its metrics have each step's time."""
    from smp.train.__main__ import main

    words: list[Any] = [
        "--hf_pretrained_model_name_or_dir", base, "--training_dir", data, "--output_dir", folder / "run",
        "--max_context_width", LENGTH, "--train_batch_size", rows, "--max_steps", steps, "--lr", 1e-3,
        "--lr_decay_style", "constant", "--warmup", 0, "--weight_decay", 0, "--beta2", 0.999, "--logging_freq", 1,
        "--lora_rank", RANK, "--activation_checkpointing", 0, "--distributed_backend", backend,
        "--data_cache_dir", folder / "cache", "--checkpoint_freq", 10**6, "--save_final_model", 0,
    ]  # fmt: skip
    if status := main([str(word) for word in words]):
        sys.exit(status)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "loss" in line]
    _report(folder, [line["step_time_s"] for line in found], [line["loss"] for line in found])


def train_trl(folder: Path, base: Path, data: Path, *, steps: int, rows: int) -> None:
    """Run SFTTrainer on the same rows."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Times(TrainerCallback):
        """Seconds between the ends of steps."""

        def __init__(self) -> None:
            self.at = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.at.append(time.perf_counter())

    settings = SFTConfig(
        output_dir=str(folder / "run"), max_steps=steps, per_device_train_batch_size=rows, learning_rate=1e-3,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, use_cpu=True, bf16=False, max_length=LENGTH,
        logging_steps=1, save_strategy="no", report_to=[], gradient_checkpointing=False, disable_tqdm=True,
        fsdp=True, fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )  # fmt: skip
    times = Times()
    ids = [json.loads(line)["input_ids"] for line in (data / "rows.jsonl").read_text().splitlines()]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base), args=settings,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=AutoTokenizer.from_pretrained(ROOT / "data" / "sample" / "tokenizer"),
        callbacks=[times],
        peft_config=LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    # On GPUs Accelerate sets these when it has the plug-in; on CPUs it ignores the plug-in and makes the model DDP.
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True
    trainer.train()
    if not any(isinstance(parameter, DTensor) for parameter in trainer.model_wrapped.parameters()):
        sys.exit("TRL's model was not sharded")
    seconds = [later - earlier for earlier, later in zip(times.at, times.at[1:], strict=False)]
    _report(folder, seconds, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def measure(variant: str, base: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a variant in fresh processes; return the median step's seconds, the largest process's MiB, the losses."""
    with tempfile.TemporaryDirectory() as folder:
        worker = [
            "-m", "smp.launch.local", "--nproc_per_node", str(PROCESSES), "-m", "benchmarks.finetune", "--worker",
            variant, "--folder", folder, "--base", str(base), "--data", str(data),
            "--steps", str(options.steps + WARMUP), "--rows", str(options.rows),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run([sys.executable, *worker], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{variant} ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    return {
        "seconds": statistics.median(reports[0]["seconds"][WARMUP:]),
        "peak_mib": max(report["peak_mib"] for report in reports),
        "losses": reports[0]["losses"],
    }


def _inputs(folder: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """Write the model and the rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1376, num_hidden_layers=options.layers,
        num_attention_heads=8, num_key_value_heads=8, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    (folder / "data").mkdir()
    rows = torch.randint(1, 2048, (PROCESSES * options.rows, LENGTH)).tolist()
    (folder / "data" / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return folder / "base", folder / "data"


def _ratio(results: dict[str, list[dict[str, Any]]], variant: str, key: str) -> str:
    """Return the median of a variant's ratios to TRL by round, with their range."""
    ratios = [own[key] / peer[key] for own, peer in zip(results[variant], results["trl"], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def compare(options: argparse.Namespace) -> str:
    """Run all rounds; return the page."""
    import peft
    import transformers
    import trl

    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.variants}
    bystanders = Bystanders()
    with tempfile.TemporaryDirectory() as folder:
        base, data = _inputs(Path(folder), options)
        for number in range(options.rounds):
            for name in options.variants:
                results[name].append(measure(name, base, data, options))
                print(f"round {number + 1} {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    first = {name: found[0]["losses"][0] for name, found in results.items()}
    if max(first.values()) - min(first.values()) > 1e-3:
        sys.exit(f"the first losses differ, so that it is not the same work: {first}")
    versions = (f"transformers {transformers.__version__}", f"peft {peft.__version__}", f"TRL {trl.__version__}")
    lines = [
        "# LoRA finetuning beside TRL", "",
        *origin(*versions, "gloo for TRL"), bystanders.describe(), "",
        f"A Llama of {options.layers} blocks of width 512, rank {RANK} on all linear layers, fp32, {PROCESSES} "
        f"processes of one thread, {options.rows} rows of {LENGTH} tokens each; median of {options.steps} steps, "
        f"{options.rounds} interleaved rounds. The first loss of all is the same to 1e-3. TRL measures entropy and "
        "token accuracy in each step, which is its default.", "",
        "| | s a step | peak MiB of a process | time / TRL's | memory / TRL's |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name in results:
        seconds, peak = (statistics.median(found[key] for found in results[name]) for key in ("seconds", "peak_mib"))
        ratios = [_ratio(results, name, key) for key in ("seconds", "peak_mib")] if name != "trl" else ["1", "1"]
        lines.append(f"| {NAMES[name]} | {seconds:.3f} | {peak:.0f} | {' | '.join(ratios)} |")
    return "\n".join([*lines, "", "Ratios are of the same round: the median, and the range over rounds.", ""])


def main() -> None:
    """Compare, or be a process of one variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="timed, after two that are not")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="of a process")
    parser.add_argument("--variants", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--output", type=Path, help="page to write")
    for name in ("worker", "folder", "base", "data"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is None:
        publish(compare(options), options.output)
        return
    paths = (Path(options.folder), Path(options.base), Path(options.data))
    if options.worker == "trl":
        train_trl(*paths, steps=options.steps, rows=options.rows)
    else:
        backend = "gloo" if options.worker == "smp_gloo" else "smddp"
        train_smp(*paths, steps=options.steps, rows=options.rows, backend=backend)


if __name__ == "__main__":
    main()
