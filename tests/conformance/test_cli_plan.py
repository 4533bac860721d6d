"""`smp plan`: what it prints and writes, and its refusals; layouts are planned by a stand-in but for one test."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re

import pytest

import smp.cli
import smp.cli.plan
import smp.train.__main__ as job
from smp.launch.command_line import check_arguments
from smp.memory.categories import OTHER
from smp.plan import document, ledger, request
from smp.plan.devices import DEVICES, read_row, write_row
from smp.plan.records import LayoutPlan, Moment, RankMemory, StepTime
from smp.train import planned
from smp.train.arguments import FLAGS
from smp.units import GIB
from tests.clock import HANG_SECONDS
from tests.job import LLAMA, run_job

pytestmark = pytest.mark.smoke
TINY = ["--gpus_per_node", 2, *LLAMA]


class Planner:
    """Plans from a table: GiB allocated for each sample of a micro-batch, by recomputation."""

    def __init__(self):
        self.asked, self.factor, self.chosen, self.notes = [], 1.0, {}, []

    def __call__(self, jobs, **where):
        return [self.plan(words, **where) for words in jobs]

    def plan(self, words, *, nodes, local, row, exact):
        self.asked.append((words, nodes, local, exact))
        settings = check_arguments(words, pathlib.Path.cwd()).settings
        kept = {"none": 5, "selective": 4}
        mode = settings["activation_checkpointing_mode"] if settings["activation_checkpointing"] else "none"
        size = int((2 + kept.get(mode, 2) * settings["train_batch_size"]) * self.factor * GIB)
        tensors = {"parameters": 2 * GIB, "activations": size - 2 * GIB}
        peak = Moment("backward of block 3", tensors)
        memory = RankMemory(
            0, peak, tensors, int(1.1 * size) if row.is_gpu else None, GIB, int(row.memory * GIB),
            timeline=[("forward of block 0", {"parameters": GIB}), ("backward of block 3", tensors)],
        )  # fmt: skip
        seconds = 1.5 if mode in kept else 2.0
        step = StepTime(seconds, 0.75 * seconds, 1.25 * seconds, {"compute": seconds}, GIB, 2 * GIB, row.described)
        return LayoutPlan("", memory, step, 0, "exact" if exact else "blocks", self.notes, chosen=self.chosen)


@pytest.fixture
def planner(monkeypatch, tmp_path):
    made = Planner()
    monkeypatch.setattr(smp.cli.plan, "find", functools.partial(request.find, planner=made))
    monkeypatch.setenv("SMP_DEVICES_DIR", str(tmp_path / "devices"))
    return made


@pytest.fixture
def call(capsys):
    def run(*words):
        status = smp.cli.main(["plan", *map(str, words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_own_flags_are_no_flags_of_the_job():
    parser = smp.cli._parser("plan")
    (commands,) = [action for action in parser._actions if hasattr(action, "choices") and action.choices]
    own = {action.dest for action in commands.choices["plan"]._actions}
    assert own & FLAGS.keys() == set() and "search" in own


def test_the_best_is_shown_with_its_memory_time_and_cost(planner, call):
    status, out, err = call(*TINY, "--tokens", "1B", "--price", 2.5, "--search", 0)
    assert (status, err) == (0, "")
    assert out.startswith("llama_v2 on 2 h100: fits, with 71.5 GiB of 79.1 to spare\n")
    for text in (
        "activations", "reserved by the allocator", "the peak is in: backward of block 3",
        "disk, GiB: checkpoint", "step: 2 s, from 1.5 s to 2.5 s\n  by data-sheet constants of h100",
        "1 B tokens: 15,625,000 steps", "tokens/s on each device, model FLOPs utilisation",
        "Planned in bf16",
    ):  # fmt: skip
        assert text in out, text
    assert len(planner.asked) == 1 and planner.asked[0][1:] == (1, 2, False)
    assert max(map(len, out.splitlines())) <= 100 and "\x1b" not in out and "\r" not in out


def test_the_fastest_that_fit_come_with_flags_to_copy(planner, call):
    status, out, _ = call(*TINY, "--activation_checkpointing_mode", "full", "--offload_activations", 0)
    assert status == 0 and "the fastest that fit" in out
    flags = re.findall(r"^    (--tensor_parallel_degree .*)$", out.replace("\\\n    ", ""), re.M)
    assert len(flags) == 3 and all("--train_batch_size" in line for line in flags)
    assert "--activation_checkpointing_mode" not in "".join(flags)  # it was given
    assert check_arguments([*map(str, LLAMA), *flags[0].split()], pathlib.Path.cwd())
    assert len(planner.asked) <= 12
    assert call(*TINY, "--top", 1, "--exact", 1)[1].count("--tensor_parallel_degree") == 1
    assert planner.asked[-1][3] is True and not any(asked[3] for asked in planner.asked[:-1])


def test_a_job_that_splits_sequences_is_planned(planner, call):
    words = ["--max_context_width", 32768, "--train_batch_size", 1]
    status, out, _ = call(*TINY, *words, "--context_parallel_degree", 2, "--search", 0)
    assert status == 0 and "32,768 tokens a step" in out and "(cp 2 inside)" in out  # one sequence of two devices
    assert planner.asked[-1][0].count("--context_parallel_degree") == 1
    # One sequence a step, for two devices.
    status, out, _ = call(*TINY, *words, "--global_batch_size", 1, "--tensor_parallel_degree", 1)
    assert status == 0 and re.search("^ +shard +tp +cp +batch", out, re.M) and "--context_parallel_degree 2" in out
    assert "context" not in next(line for line in out.splitlines() if line.startswith("Not supported"))
    assert not re.search("^ +shard +tp +cp", call(*TINY)[1], re.M)


def test_a_mixture_says_what_unbalanced_tokens_would_need(planner, call):
    words = ["--model", "mixtral_tiny", "--use_synthetic_data", 1, "--search", 0]
    status, out, _ = call(*words, "--gpus_per_node", 2, "--expert_parallel_degree", 2)
    assert status == 0 and "2,299,008 parameters (1,119,360 active for a token), " in out
    assert re.search(r"^  with tokens balanced; at most [\d.]+ GiB if all go to the experts of one rank$", out, re.M)
    content = json.loads(call(*words, "--gpus_per_node", 2, "--expert_parallel_degree", 2, "--json", "-")[1])
    memory = content["layouts"][0]["memory"]
    assert memory["worst_case"] > memory["reserved"] + memory["outside"] and content["active_parameters"] == 1_119_360
    assert "tokens balanced" not in call(*words, "--gpus_per_node", 2)[1]


def test_what_does_not_fit_says_because_of_what(planner, call):
    planner.factor = 21.0
    status, out, _ = call(*TINY)
    assert status == 1
    first = out.splitlines()[0]
    assert re.search(
        r"does not fit: at least [\d.]+ GiB more than the 79.1 of a device; the largest part is activ", first
    )
    assert "nothing fits:" in out and "missing" in out


def test_a_layout_that_does_not_fit_is_told_once_and_with_the_sharding_that_would(planner, call):
    planner.factor = 21.0
    words = ["--model", "llama3_8b", "--nodes", 8, "--gpus_per_node", 2, "--gpu_memory_gib", 30, "--search", 0]
    status, out, _ = call(*words)
    assert status == 1
    assert out.count("shard 2 x 8 replicas") == 1
    assert "full sharding over 8 of these devices would suffice: give --sharding_strategy full_shard" in out
    out = call(*words, "--sharding_strategy", "full_shard")[1]
    assert "More devices, more memory on each" in out and "full sharding over" not in out


def test_a_stalling_allocator_is_told(planner, call):
    planner.factor = 12.5  # 75 GiB of tensors, for which 82.5 are reserved, and 1 outside
    status, out, _ = call(*TINY, "--search", 0)
    assert status == 0 and "fits, but the allocator will flush and stall" in out.splitlines()[0]
    status, out, _ = call(*TINY, "--search", 0, "--gpu_memory_gib", 85)
    assert "fits, tight: 1.50 GiB (1.8 %) of 85.0 to spare" in out.splitlines()[0]


def test_the_same_flags_give_the_same_json(planner, call, tmp_path):
    words = [*TINY, "--tokens", "1B", "--network", "efa400"]
    first, second = call(*words, "--json", "-"), call(*words, "--json", "-")
    assert first == second and first[0] == 0
    content = json.loads(first[1])
    assert content["schema"] == 1 and content["flags"] == list(map(str, LLAMA))
    assert content["cluster"]["network"] == 6.25 and content["device_row"]["source"] == "data sheet"
    best = content["layouts"][0]
    assert best["fits"] == "fits" and best["memory"]["at_peak"]["activations"] > 0 and best["method"] == "blocks"
    assert best["step"]["parts"] and best["cost"]["steps"] > 0 and best["cost"]["money"] is None
    assert {"reason", "bytes_over", "mesh"} <= content["refused"][0].keys()
    status, out, err = call(*words, "--json", tmp_path / "plan.json")
    assert (status, err) == (0, f"wrote {tmp_path / 'plan.json'}\n") and out.startswith("llama_v2 on 2 h100")
    assert (tmp_path / "plan.json").read_text() == first[1]


def test_global_tokens_set_the_batch(planner, call):
    call(*TINY, "--global_tokens", "1Ki", "--json", "-")
    words = planner.asked[0][0]
    assert words[words.index("--global_batch_size") + 1] == "64"
    settings = [check_arguments(words, pathlib.Path.cwd()).settings for words, *_ in planner.asked]
    assert {each["global_batch_size"] for each in settings} == {64}


def test_a_plan_of_cpus_has_no_allocator_and_no_price_of_time(planner, call):
    status, out, _ = call(*TINY, "--device", "cpu", "--gpu_memory_gib", 64)
    assert status == 0 and "2 CPU processes" in out
    assert "reserved" not in out.split("the fastest")[0] and "bf16" not in out and "+offload" not in out


def test_the_title_says_what_was_chosen(planner, call):
    assert "recompute full: " in call(*TINY, "--search", 0)[1]
    planner.chosen = {"activation_checkpointing_mode": "selective", "gc_freq": 0}
    assert "recompute selective: " in call(*TINY, "--search", 0)[1]


def test_blocks_that_are_not_compiled_by_default_are_told(planner, call):
    assert "uncompiled" not in call(*TINY, "--search", 0)[1]
    planner.notes = ["chosen: --compile 0 (it communicates)", "chosen: --gc_freq 0 (x)"]
    assert "\nBlocks run uncompiled (it communicates).\n" in call(*TINY, "--search", 0)[1]


def test_what_the_seconds_leave_out_is_told(planner, call):
    words = [*TINY, "--search", 0, "--cpu_offload", 1, "--offload_activations", 1, "--offload_dir", "/nowhere/fast"]
    told = ("timed for a host with 16 cores a device", "as if they went to the host's memory")
    status, out, _ = call(*words)
    assert status == 0 and all(text in out for text in told)
    assert all(text in "".join(json.loads(call(*words, "--json", "-")[1])["notes"]) for text in told)


@pytest.mark.parametrize("name", ["fused", "flash_attention_3", "flex_attention"])
def test_attention_that_this_machine_lacks_is_planned(name, planner, call):
    status, out, err = call(*TINY, "--search", 0, "--attn_implementation", name)
    assert status == 0, err
    assert (f"not those of --attn_implementation {name}." in out) == (name != "fused")


@pytest.mark.full
def test_the_memory_is_drawn(planner, call, tmp_path):
    pytest.importorskip("matplotlib")
    status, _, err = call(*TINY, "--search", 0, "--plot", tmp_path / "memory.png")
    assert status == 0 and err == f"wrote {tmp_path / 'memory.png'}\n"
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--device", "h1000"], "--device h1000 is not known: give one of a100_40gb"),
        (["--nodes", 0], "--nodes must be at least 1, got 0"),
        (["--nodes", "many"], "argument --nodes: invalid int value: 'many'"),
        (["--nodes", 10000], "are 80000 devices: plan for at most 65536"),
        (["--gpu_memory_gib", -1], "--gpu_memory_gib must be above 0, got -1.0"),
        (["--price", 2], "--price has a meaning only with --tokens"),
        (["--tokens", "lots"], "--tokens takes a number of tokens such as 4Mi, 300B or 1T, got 'lots'"),
        (["--network", "wire"], "--network wire is not known"),
        (["--gpus_per_nod", 4], "unknown flag --gpus_per_nod: did you mean --gpus_per_node?"),
        (["--gpus", 4], "unknown flag --gpus: did you mean --gpus_per_node?"),
        (["--lora", 1], "unknown flag --lora: --lora_rank N trains adapters of that rank"),
        (["--learning_rate", 1], "unknown flag --learning_rate: here it is --lr"),
        (["--device", "a100"], "--device a100 is not one device: say which, a100_40gb or a100_80gb"),
        (["--train_batch_siz", 4], "unknown flag --train_batch_siz: did you mean train_batch_size?"),
        (["--model", "llama_huge"], "llama_huge"),
        (["--json", "/nowhere/plan.json"], "--json /nowhere/plan.json cannot be written: /nowhere is no directory"),
        (["--json", "/"], "--json / is a directory: give the name of a file"),
        (["--plot", "plan.pdf"], "--plot plan.pdf is not allowed: give a file that ends in .png"),
        (
            ["--model", "llama_tiny", "--global_tokens", "4Mi", "--global_batch_size", 8],
            "both set the batch: leave one out",
        ),
        (
            ["--model", "llama_tiny", "--max_context_width", 64, "--global_tokens", 32],
            "is less than a sample of 64 tokens",
        ),
        (["--model_type", "gpt_neox", "--tensor_parallel_degree", 3], "cannot be split over 1 node(s) of 8 as asked"),
        (["--dpo", 1, "--z_loss", 0.1], "--z_loss is added to the loss of tokens, and --dpo 1 has another"),
        (["--evaluate_only", 1], "--evaluate_only 1 trains nothing, and a training step is what is planned"),
        (["--num_heads", 4, "--tensor_parallel_degree", 8], "8 does not divide the 4 attention heads: choose one of 1"),
        (
            ["--model", "llama_tiny", "--hybrid_shard_degree", 3],
            "--hybrid_shard_degree 3 does not divide the 8 data-parallel processes",
        ),
        (["--ledger", "/nowhere"], "--ledger /nowhere is no directory"),
        (["--ledger", ".", "--model", "llama_tiny"], "--ledger takes no flags of a job"),
        (["--calibrate", "--model", "llama_tiny"], "--calibrate takes no flags of a job"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, planner, call):
    status, out, err = call(*words)
    assert (status, out) == (2, "") and sentence in err and "Traceback" not in err
    assert err.startswith("error: ") and len(err.splitlines()) == 1


def test_conversations_that_are_given_are_said(planner, call, tmp_path):
    sample = pathlib.Path(__file__).parents[2] / "data" / "sample"
    data = [
        *TINY, "--vocab_size", 2048, "--max_context_width", 128, "--dataset_type", "chat", "--tokenizer_name_or_dir",
        sample / "tokenizer", "--chat_template", sample / "chat_template.jinja", "--data_cache_dir", tmp_path,
    ]  # fmt: skip
    said = r"training data: \d+ samples in \d+ sequences \(\d\d\.\d % full\), \d\d\.\d % of their tokens trained on"
    for words in (["conversations.jsonl"], ["preferences.jsonl", "--lora_rank", 2, "--dpo", 1]):
        _, out, _ = call(*data, "--training_dir", sample / words[0], *words[1:])
        assert len(re.findall(said, out)) == 1
    assert "trained on" not in call(*data)[1]
    apart = ["--training_dir", sample / "preferences.jsonl", "--dpo", 1, "--pack", 0, "--json", tmp_path / "plan.json"]
    _, out, _ = call(*data, *apart, "--search", 0, "--train_batch_size", 4)
    assert re.search(r"training data: 200 samples in 400 sequences \(\d+\.\d tokens each\)", out)
    (layout,) = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert layout["tokens"] == 2 * 2 * 4 * 128  # ranks, answers, pairs, tokens
    _, out, err = call(*data, "--training_dir", tmp_path / "elsewhere")
    assert "How much of a sequence is trained on is not known here: " in out and "elsewhere" in out
    assert "Traceback" not in err


def test_a_ledger_is_shown_and_refits_the_row(planner, call, tmp_path):
    assert call("--ledger", tmp_path)[2].startswith(f"error: no {ledger.ERROR} under {tmp_path}")
    assert call(*TINY, "--json", tmp_path / "plan.json", "--search", 0)[0] == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    for number, seconds in enumerate((2.0, 2.5, 3.0)):
        (tmp_path / f"run{number}").mkdir()
        line = ledger.entry(
            plan, categories=None, allocated=24 * GIB, reserved=25 * GIB, resident=None, step_seconds=seconds,
            about={"processes": 2},
        )  # fmt: skip
        document.write(line, tmp_path / f"run{number}" / ledger.ERROR)
    status, out, _ = call("--ledger", tmp_path)
    assert status == 0 and re.search(r"^run1 +h100 +2 ", out, re.M) and "-20.0 %" in out
    assert "h100: speed x 0." in out and "from 3 run(s), the median" in out
    row = read_row(tmp_path / "devices" / "h100.json")
    assert (row.factor, row.runs, row.source) == (pytest.approx(0.8 * DEVICES["h100"].factor), 3, "data sheet")
    # A second look at the same runs changes nothing.
    assert call("--ledger", tmp_path)[1] == out


def test_a_measured_cpu_has_times(planner, call, tmp_path):
    row = dataclasses.replace(DEVICES["h100"], name="cpu", capability=None, source="measured", memory=1.0)
    write_row(row, tmp_path / "devices" / "cpu.json")
    status, out, _ = call(*TINY, "--device", "cpu", "--gpu_memory_gib", 64)
    assert status == 0 and "step: 2 s" in out and "by measured 20" in out


@pytest.mark.full
def test_a_tiny_job_is_planned_and_trained(tmp_path, capsys):
    """The planner itself, as the job starts it, and its error in the run's directory."""

    def takes_its_time(rank):
        job.predict = functools.partial(planned.predict, seconds=HANG_SECONDS)

    words = [*LLAMA, "--use_synthetic_data", 1, "--max_steps", 8, "--plan", 1, "--output_dir", tmp_path / "run"]
    run_job(*words, world_size=2, prepare=takes_its_time).succeeded()
    plan = json.loads((tmp_path / "run" / ledger.PLAN).read_text())
    assert plan["layouts"][0]["method"] in ("blocks", "exact") and plan["cluster"]["gpus_per_node"] == 2
    found = json.loads((tmp_path / "run" / ledger.ERROR).read_text())
    del found["categories"][OTHER]  # the job's processes are forked from one in which other tests have run
    assert [name for name, each in found["categories"].items() if each["predicted"] != each["measured"]] == []
    assert smp.cli.main(["plan", "--ledger", str(tmp_path)]) == 0
    assert "run" in capsys.readouterr().out


def test_a_dry_run_asks_for_the_plan(tmp_path):
    command = planned.planner_command

    def is_printed(rank):
        planned.planner_command = lambda job: ["echo", *command(job)]

    words = [*LLAMA, "--use_synthetic_data", 1, "--output_dir", tmp_path / "run"]
    dry = ["--dry_run", 1, "--dry_run_world_size", 4, "--plan", 1]
    report, _, asked = run_job(*words, *dry, prepare=is_printed).succeeded().output.partition("-m smp plan")
    assert "predicted peak of each rank, a process on CPUs in float32:" in report
    assert "--search 0 --nodes 1 --gpus_per_node 4 --device cpu" in asked and "--hidden_width 32" in asked
    assert not (tmp_path / "run").exists()
