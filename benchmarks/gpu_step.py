"""Speed, memory and synchronisations of a training step on GPUs, beside Hugging Face's Trainer and torch's own parts.

    python benchmarks/gpu_step.py --out gpu_step                                # one H100, under an hour
    python benchmarks/gpu_step.py --out gpu_step --quick --time_limit 420 --timeout 170   # again, until nothing is left
    python benchmarks/gpu_step.py --out /tmp/trial --tiny --layers 1 2          # a trial on a CPU

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_meter import Case
from gpu_variants import REFERENCE, SECTIONS_BESIDE, TENSOR_PARALLEL, VARIANTS, measure
from pages import origin

GIB = 2**30
Result = dict[str, Any]


def cases(arguments: argparse.Namespace) -> list[Case]:
    """List all measurements in their order: rounds outside, so that variants take turns."""
    base = Case("", 1, arguments.sequence, tiny=arguments.tiny)
    if arguments.quick:
        base = dataclasses.replace(base, warmup=3, steps=5, watched=2)
    made = functools.partial(dataclasses.replace, base)
    rounds = range(arguments.rounds)
    rows = itertools.product(rounds, arguments.layers, [*arguments.variants, *arguments.flags])
    found = [made(variant=variant, layers=layers, number=number) for number, layers, variant in rows]
    found += [made(variant=section) for section in arguments.sections]
    if arguments.processes > 1:
        several = [name for name in arguments.variants if name in VARIANTS and VARIANTS[name].several]
        whole = made(layers=min(arguments.layers) if arguments.tiny else 32, processes=arguments.processes)
        for number, variant in itertools.product(rounds, [*several, *TENSOR_PARALLEL]):
            found.append(dataclasses.replace(whole, variant=variant, number=number))
    return found


def start(case: Case, folder: Path, timeout: float) -> Result:
    """Measure in a fresh process, or in as many as the case asks for, and return what the first one wrote."""
    name = f"{case.variant}-{case.layers}-{case.processes}-{case.number}".replace("/", "_").replace(" ", "_")
    written, log = folder / "now.json", folder / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    written.unlink(missing_ok=True)
    environment = dict(os.environ)
    command = [sys.executable]
    if case.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(case.processes)]
    else:  # the Trainer would make one model of several GPUs
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command += [__file__, "--worker", json.dumps(dataclasses.asdict(case)), "--out", str(written)]
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environment, process_group=0)
        try:
            why = f"ended with status {child.wait(timeout)}, see {log.name}"
        except subprocess.TimeoutExpired:
            why = f"not done within {timeout:g} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if written.exists():  # also of one that did not end in time
        return json.loads(written.read_text())
    return {**dataclasses.asdict(case), "failed": why}


def work(text: str, path: Path) -> None:
    """Measure in this process; the first of several writes."""
    found = measure(Case(**json.loads(text)))
    if os.environ.get("RANK", "0") == "0":
        path.with_suffix(".new").write_text(json.dumps(found))
        path.with_suffix(".new").replace(path)


def run(arguments: argparse.Namespace, begin: Callable[[Case, Path, float], Result] = start) -> list[Result]:
    """Measure what ``results.jsonl`` does not have yet; each result and the page are written at once."""
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    results = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be cut off
    known = {field.name for field in dataclasses.fields(Case)}
    done = {Case(**{name: value for name, value in each.items() if name in known}).key for each in results}
    todo = [case for case in cases(arguments) if case.key not in done]
    began = time.monotonic()
    for position, case in enumerate(todo):
        if time.monotonic() - began > arguments.time_limit:
            print(f"{len(todo) - position} measurements are left: run again with the same --out", file=sys.stderr)
            break
        result = begin(case, folder, arguments.timeout)
        results.append(result)
        with file.open("a") as log:
            log.write(json.dumps(result) + "\n")
        (folder / "gpu_step.md").write_text(page(results))
        seen = f"{result['seconds'] * 1e3:.0f} ms a step" if "seconds" in result else result.get("failed", "done")
        print(f"[{position + 1}/{len(todo)}, {time.monotonic() - began:.0f} s] {case.variant}, {case.layers} layers, "
              f"{case.processes} GPU(s): {seen}", file=sys.stderr, flush=True)  # fmt: skip
    return results


def _groups(results: Iterable[Result], *, several: bool) -> dict[tuple[int, str], list[Result]]:
    """Sort results of steps by (layers, variant), in the order of measuring."""
    found: dict[tuple[int, str], list[Result]] = defaultdict(list)
    for each in results:
        if each["variant"] not in SECTIONS_BESIDE and (each["processes"] > 1) == several:
            found[each["layers"], each["variant"]].append(each)
    return found


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def _paired(mine: list[Result], other: list[Result]) -> str:
    """Return the median over rounds of two speeds' ratio, in one round each."""
    speeds = {each["number"]: tokens_per_second(each) for each in other if "seconds" in each}
    ratios = [tokens_per_second(each) / speeds[each["number"]] for each in mine if each["number"] in speeds]
    return f"{_median(ratios):.2f}" if ratios else "-"


def _drift(mine: list[Result], other: list[Result]) -> str:
    """Return the largest relative difference of the losses, step by step, where both train on the same samples."""
    ranks = mine[0].get("data_ranks", 1)
    wanted = next((e["losses"] for e in other if "losses" in e and e.get("data_ranks", 1) == ranks), None)
    if wanted is None:
        return "-"
    pairs = [pair for each in mine for pair in zip(each["losses"], wanted, strict=False)]
    return f"{max(abs(one - two) / abs(two) for one, two in pairs):.1e}"


def tokens_per_second(each: Result) -> float:
    """Return the tokens of a step of all data ranks, by its seconds."""
    return each.get("data_ranks", 1) * each["sequence"] / each["seconds"]


def steps_table(groups: dict[tuple[int, str], list[Result]]) -> list[str]:
    """Format one row for each variant and number of layers; one that failed says why."""
    lines = [
        "| layers | variant | step, ms | tokens/s per GPU | MFU | times today's default | peak, GiB | predicted, GiB | "
        "synchronisations a step | loss, relative to the default's |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (layers, variant), found in groups.items():
        measured = [each for each in found if "seconds" in each]
        if not measured:
            lines.append(f"| {layers} | {variant} | failed: {found[0]['failed']} |" + " - |" * 7)
            continue
        speed = _median(tokens_per_second(each) for each in measured) / measured[0]["processes"]
        peak_flops, first = measured[0]["peak_flops"], measured[0]
        mfu = f"{speed * first['flops_per_token'] / peak_flops:.1%}" if peak_flops else "-"
        times = sorted(each["seconds"] * 1e3 for each in measured)
        spread = f"{_median(times):.1f}" + (f" ({times[0]:.1f}-{times[-1]:.1f})" if len(times) > 1 else "")
        predicted = f"{first['predicted'] / GIB:.1f}" if "predicted" in first else "-"
        syncs = first["synchronisations"]
        reference = groups.get((layers, REFERENCE), [])
        lines.append(
            f"| {layers} | {variant} | {spread} | {speed:.0f} | {mfu} | {_paired(measured, reference)} | "
            f"{_median(each['peak'] for each in measured) / GIB:.1f} | {predicted} | "
            f"{'-' if syncs is None else f'{sum(syncs.values()):.1f}'} | {_drift(measured, reference)} |"
        )
    return lines


def blocks_table(groups: dict[tuple[int, str], list[Result]]) -> list[str]:
    """Format the time of a block: what the larger model takes longer. The rest is embedding, head, loss and update."""
    counts = sorted({layers for layers, _ in groups})
    lines = ["| variant | one block, ms | its MFU | the rest of the step, ms | 32 blocks and the rest, tokens/s |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    if len(counts) < 2:
        return []
    few, many = counts[0], counts[-1]
    for variant in dict.fromkeys(name for _, name in groups):
        pair = [[e for e in groups.get((n, variant), []) if "seconds" in e] for n in (few, many)]
        if not all(pair):
            continue
        one, two = (_median(each["seconds"] for each in found) for found in pair)
        block, first, last = (two - one) / (many - few), pair[0][0], pair[1][0]
        flops = (last["flops_per_token"] - first["flops_per_token"]) / (many - few) * first["sequence"]
        peak, rest = first["peak_flops"], one - few * block
        mfu = f"{flops / block / peak:.1%}" if peak and block > 0 else "-"
        whole = first["sequence"] / (32 * block + rest) if 32 * block + rest > 0 else 0.0
        lines.append(f"| {variant} | {block * 1e3:.2f} | {mfu} | {rest * 1e3:.1f} | {whole:.0f} |")
    return lines if len(lines) > 2 else []


def synchronisations_list(groups: dict[tuple[int, str], list[Result]]) -> list[str]:
    """List which lines make the host wait, and how often in a step."""
    lines = []
    for variant in dict.fromkeys(name for _, name in groups):
        found = next((e["synchronisations"] for (_, n), all_ in groups.items() if n == variant for e in all_
                      if e.get("synchronisations") is not None), None)  # fmt: skip
        if found is not None:
            lines += ["", f"{variant}: {sum(found.values()):.1f} a step.", ""] + [
                f"- {count:.1f}: {line}" for line, count in sorted(found.items(), key=lambda item: -item[1])
            ]
    return lines or ["Counted on GPUs alone."]


def attention_table(each: Result) -> list[str]:
    """Format causal attention of one sample, by backend."""
    if "times" not in each:
        return [f"failed: {each['failed']}"]
    lines = ["| backend | forward, ms | forward and backward, ms |", "|---|---:|---:|"]
    for name, times in each["times"].items():
        if len(times) == 2:
            lines.append(f"| {name} | {times[0] * 1e3:.2f} | {times[1] * 1e3:.2f} |")
        else:
            lines.append(f"| {name} | failed: {times[0]} | - |")
    return lines


def save_lines(each: Result) -> list[str]:
    """Say how long training stands still for an asynchronous save."""
    if "stalls" not in each:
        return [f"failed: {each['failed']}"]
    first, second = each["stalls"]
    return [
        f"A step takes {each['alone']:.3f} s; with the first asynchronous save of {each['bytes'] / GIB:.1f} GiB, which "
        f"makes the pinned memory, {first:.2f} s more, with the second {second:.2f} s more."
    ]


def page(results: list[Result]) -> str:
    """Return the page of all results so far."""
    steps, several = _groups(results, several=False), _groups(results, several=True)
    sizes = next((f", {each['memory'] / GIB:.0f} GiB" for each in results if each.get("memory")), "")
    devices = ", ".join(dict.fromkeys(each["device"] for each in results if "device" in each)) + sizes
    first = next(iter(results), {})
    run = f"{first.get('steps')} steps after {first.get('warmup')} to warm up, {first.get('sequence')} tokens a step"
    names = dict.fromkeys(name for _, name in (*steps, *several))
    tp = {name: f"the job's step with `{flags}` and tensor parallelism" for name, flags in TENSOR_PARALLEL.items()}
    known = tp | {name: variant.what for name, variant in VARIANTS.items()}
    what = [f"- {name}: {known.get(name, 'the job with these flags')}." for name in names]
    lines = [
        "# One training step on GPUs", "", *origin(f"transformers {transformers.__version__}", devices, run),
        "benchmarks/README.md says how it is measured. Every row: the same values, tokens, AdamW settings, clipping at "
        "1 and torch's `scaled_dot_product_attention`; bf16 on a GPU. What differs:", "", *what,
        "", "## One GPU", "", *steps_table(steps), "", "### A block", "", *blocks_table(steps),
        "", "### Where the host waits for the device", "", *synchronisations_list(steps),
    ]  # fmt: skip
    for each in results:
        if each["variant"] == "attention":
            lines += ["", "## Attention", "", "32 heads of 128 with 8 of K and V, one sample.", "",
                      *attention_table(each)]  # fmt: skip
        elif each["variant"] == "save":
            lines += ["", "## Asynchronous save", "", *save_lines(each)]
    if several:
        lines += ["", f"## {next(iter(several.values()))[0]['processes']} GPUs", "", *steps_table(several)]
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="directory of results.jsonl, logs and gpu_step.md")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 6], help="blocks of llama3_8b (default 4 6)")
    parser.add_argument("--sequence", type=int, help="tokens of a step (default 8192; tiny: 64)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--flags", nargs="+", default=[], help="further rows, each the job's flags in one word")
    parser.add_argument("--sections", nargs="*", choices=SECTIONS_BESIDE, default=list(SECTIONS_BESIDE))
    parser.add_argument("--rounds", type=int, help="times that every variant is measured (default 3)")
    parser.add_argument("--processes", type=int, help="GPUs of the whole llama3_8b (default: all, if 8 or more)")
    parser.add_argument("--quick", action="store_true", help="one round of few steps")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one measurement (default 300)")
    parser.add_argument("--time_limit", type=float, default=1e9, help="begin no measurement after so many seconds")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.sequence = arguments.sequence or (64 if arguments.tiny else 8192)
    arguments.rounds = arguments.rounds or (1 if arguments.quick or arguments.tiny else 3)
    if arguments.processes is None:
        count = torch.cuda.device_count()
        arguments.processes = count if count >= 8 else 1
    if min(*arguments.layers, arguments.sequence, arguments.rounds, arguments.processes) < 1:
        parser.error("--layers, --sequence, --rounds and --processes must be at least 1")
    return arguments


def main(argv: list[str]) -> None:
    """Measure, and write the page."""
    arguments = parse(argv)
    if arguments.worker:
        work(arguments.worker, arguments.out)
    else:
        run(arguments)
        print(f"{arguments.out}/gpu_step.md")


if __name__ == "__main__":
    main(sys.argv[1:])
