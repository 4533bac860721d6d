"""Ranks from what launchers set: tables of environments, as each of them was seen to set it."""

import json
import os
import pathlib

import pytest

import train_lib
from smp.environment import Launch, read_launch, rendezvous, sagemaker_hosts
from smp.environment.slurm import expand_counts, first_host
from smp.errors import UserError
from smp.runtime import own_arguments

ROOT = pathlib.Path(__file__).parents[2]


def torchrun(rank, world, local_rank, local):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = dict(zip(names, map(str, (rank, world, local_rank, local)), strict=True))
    return values | {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def srun(rank, tasks="2(x2)", nodes="node[07-08]", **more):
    """What Slurm 22.05 sets for a task of a step, as far as it is read."""
    counts = expand_counts(tasks)
    node = next(n for n in range(len(counts)) if rank < sum(counts[: n + 1]))
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank - sum(counts[:node])),
        "SLURM_NTASKS": str(sum(counts)), "SLURM_STEP_NUM_TASKS": str(sum(counts)), "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_NODELIST": nodes, **more,
    }  # fmt: skip


# An sbatch script, where a program is started without srun.
BATCH = {
    "SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "16",
    "SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_NNODES": "2",
}  # fmt: skip


def openmpi(rank, world, local_rank, local, **more):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = zip(names, map(str, (rank, world, local_rank, local)), strict=True)
    return {f"OMPI_COMM_WORLD_{n}": v for n, v in values} | {
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-vm-6912@1",
        **more,
    }


def hydra(rank, world, local_rank, local):
    values = {"PMI_RANK": rank, "PMI_SIZE": world, "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local}
    return {name: str(value) for name, value in values.items()}


def sagemaker(current="algo-2", hosts=("algo-1", "algo-2", "algo-3"), **more):
    return {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": current, "SM_NUM_GPUS": "0", **more}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def by_hand(rank, world, **more):
    return {"RANK": str(rank), "WORLD_SIZE": str(world), **more}


DEEPSPEED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
MV2 = {f"MV2_COMM_WORLD_{n}": str(v) for n, v in (("RANK", 3), ("SIZE", 4), ("LOCAL_RANK", 1), ("LOCAL_SIZE", 2))}
ONE_NODE = ("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

READ = {
    "nothing": ({}, (0, 1, 0, 1), ""),
    "torchrun": (torchrun(5, 8, 1, 4), (5, 8, 1, 4), "torchrun"),
    "deepspeed": (DEEPSPEED, (1, 2, 1, 2), "deepspeed"),
    "srun": (srun(3), (3, 4, 1, 2), "srun"),
    "srun, uneven": (srun(6, "2(x3),1", "n[1-4]"), (6, 7, 0, 1), "srun"),
    "srun, one node": (without(srun(1, "3"), *ONE_NODE), (1, 3, 1, 3), "srun"),
    "srun, tasks per node": (
        without(srun(5, "4(x2)", SLURM_NTASKS_PER_NODE="4"), *ONE_NODE), (5, 8, 1, 4), "srun",
    ),
    "srun, one task a node": (without(srun(2, "1(x3)"), *ONE_NODE), (2, 3, 0, 1), "srun"),
    "srun of fewer tasks than the job": (
        srun(1, "1(x2)", SLURM_TASKS_PER_NODE="8(x2)", SLURM_NTASKS="16"), (1, 2, 0, 1), "srun",
    ),
    "srun --pty bash": (srun(0, "1"), (0, 1, 0, 1), ""),
    "sbatch without srun": (BATCH, (0, 1, 0, 1), ""),
    "salloc's own step": (BATCH | {"SLURM_STEP_ID": str(2**32 - 6)}, (0, 1, 0, 1), ""),
    "torchrun in srun": (srun(1, "1(x2)") | torchrun(9, 16, 1, 8), (9, 16, 1, 8), "torchrun"),
    "deepspeed in srun": (srun(0, "1(x2)") | DEEPSPEED, (1, 2, 1, 2), "deepspeed"),
    "torchrun in a batch script": (BATCH | torchrun(1, 2, 1, 2), (1, 2, 1, 2), "torchrun"),
    "srun, ranks also by hand": (srun(3, RANK="3", WORLD_SIZE="4"), (3, 4, 1, 2), "srun"),
    "srun, which starts its own": (srun(1, "1(x2)") | without(torchrun(9, 16, 1, 8), "TORCHELASTIC_RUN_ID"),
                                   (9, 16, 1, 8), "srun"),
    "Open MPI": (openmpi(1, 4, 1, 2), (1, 4, 1, 2), "Open MPI"),
    "Open MPI, more processes than cores on one host": (openmpi(1, 3, 2, 3), (1, 3, 2, 3), "Open MPI"),
    "Open MPI under Slurm's daemons": (srun(1, "1(x2)") | openmpi(5, 8, 1, 4), (5, 8, 1, 4), "Open MPI"),
    "Open MPI, world size exported too": (openmpi(1, 4, 1, 2, WORLD_SIZE="4"), (1, 4, 1, 2), "Open MPI"),
    "torchrun in Open MPI": (openmpi(1, 2, 0, 1) | torchrun(9, 16, 1, 8), (9, 16, 1, 8), "torchrun"),
    "srun, local rank exported too": (srun(3, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"), (3, 4, 1, 2), "srun"),
    "MVAPICH": (MV2, (3, 4, 1, 2), "MVAPICH"),
    "MPICH": (hydra(3, 4, 1, 2), (3, 4, 1, 2), "MPICH"),
    "MPICH under Slurm's proxies": (srun(1, "1(x2)") | hydra(3, 4, 1, 2), (3, 4, 1, 2), "MPICH"),
    "srun --mpi=pmi2": (srun(3, PMI_RANK="3", PMI_SIZE="4", PMI_JOBID="4711.0"), (3, 4, 1, 2), "srun"),
    "srun --mpi=pmix": (srun(3, PMIX_RANK="3", PMIX_NAMESPACE="slurm.pmix.4711.0"), (3, 4, 1, 2), "srun"),
    "SageMaker": (sagemaker(), (1, 3, 0, 1), "SageMaker"),
    "SageMaker, one host": (sagemaker("algo-1", ["algo-1"]), (0, 1, 0, 1), ""),
    "mpirun in SageMaker": (sagemaker() | openmpi(9, 24, 1, 8), (9, 24, 1, 8), "Open MPI"),
    "torchrun in SageMaker": (sagemaker() | torchrun(9, 24, 1, 8), (9, 24, 1, 8), "torchrun"),
    "ranks by hand in SageMaker": (
        sagemaker() | without(torchrun(9, 24, 1, 8), "TORCHELASTIC_RUN_ID"), (9, 24, 1, 8), "SageMaker",
    ),
    "all by hand, where Open MPI's sizes are lost": (
        without(openmpi(1, 4, 1, 2), "OMPI_COMM_WORLD_SIZE") | by_hand(1, 4, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"),
        (1, 4, 1, 2), "",
    ),
    "all by hand, where Slurm's tasks are lost": (
        without(srun(3), *ONE_NODE) | by_hand(3, 4, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"), (3, 4, 1, 2), "",
    ),
    "all by hand, where Slurm's step is lost": (
        without(srun(1), "SLURM_STEP_ID", "SLURM_STEPID") | by_hand(1, 2, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"),
        (1, 2, 1, 2), "",
    ),
    "accelerate launch, one process": ({"ACCELERATE_DYNAMO_BACKEND": "no"}, (0, 1, 0, 1), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
@pytest.mark.smoke
def test_what_launchers_say(case):
    environment, numbers, launcher = READ[case]
    launch = read_launch(environment)
    assert (launch.numbers, launch.launcher) == (numbers, launcher)


REFUSED = {
    "Slurm's rank": (srun(1) | by_hand(0, 4), "RANK=0 and SLURM_PROCID=1 contradict"),
    "a rank for all": (srun(0, RANK="0"), "RANK=0 is set and WORLD_SIZE is not: unset RANK, as srun says both"),
    "a world of one": (srun(0) | by_hand(0, 1, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"),
                       "WORLD_SIZE=1 and SLURM_STEP_NUM_TASKS=4 contradict"),
    "local size": (srun(1, LOCAL_WORLD_SIZE="4"), "LOCAL_WORLD_SIZE=4 and the tasks of this node=2 contradict"),
    "local rank alone": (
        srun(1, LOCAL_RANK="0"), "LOCAL_RANK=0 and SLURM_LOCALID=1 contradict each other: unset LOCAL_RANK, or start",
    ),
    "local rank alone, of Open MPI": (openmpi(1, 4, 1, 2, LOCAL_RANK="0"), "and OMPI_COMM_WORLD_LOCAL_RANK=1 contr"),
    "local rank alone, of SageMaker": (sagemaker(LOCAL_RANK="3"), "LOCAL_RANK=3 and the local rank of one process a h"),
    "local size with a rank": (srun(1) | by_hand(1, 4, LOCAL_WORLD_SIZE="4"), "LOCAL_WORLD_SIZE=4 and the tasks of"),
    "Open MPI's size": (openmpi(1, 4, 1, 2, WORLD_SIZE="2"), "WORLD_SIZE=2 and OMPI_COMM_WORLD_SIZE=4 contradict"),
    "MPICH's rank": (hydra(1, 4, 1, 2) | by_hand(0, 4), "RANK=0 and PMI_RANK=1 contradict"),
    "rank beyond the world": (torchrun(4, 4, 0, 4), "RANK=4 is not possible with WORLD_SIZE=4: it must be below 4"),
    "more here than everywhere": (torchrun(0, 2, 0, 4), "LOCAL_WORLD_SIZE=4 is not possible with WORLD_SIZE=2"),
    "local rank": (torchrun(1, 4, 2, 2), "LOCAL_RANK=2 is not possible with LOCAL_WORLD_SIZE=2"),
    "MPI's rank beyond": (openmpi(4, 4, 0, 2), "OMPI_COMM_WORLD_RANK=4 is not possible with OMPI_COMM_WORLD_SIZE=4"),
    "MPI's halves": (without(openmpi(1, 4, 1, 2), "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
    "MPI's size only": ({"PMI_SIZE": "4"}, "PMI_RANK is not set"),
    "PMI without local ranks": ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "MPI_LOCALRANKID or PMI_LOCAL_RANK is not set"),
    "PMIx alone": ({"PMIX_RANK": "1"}, "PMIX_RANK=1 says which process this is and nothing says how many"),
    "MPI by node": (openmpi(1, 4, 0, 2), "use `mpirun --map-by slot`"),
    "MPI, more processes than cores": (openmpi(4, 6, 2, 3), "(more processes than slots: `slot:OVERSUBSCRIBE`"),
    "Slurm in turn": (srun(1) | {"SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, "use `srun --distribution=block`"),
    "no number": (srun(1, SLURM_LOCALID="x"), "SLURM_LOCALID=x, which srun sets, is not a number"),
    "no step": (without(srun(1), "SLURM_STEP_ID", "SLURM_STEPID"), "SLURM_PROCID=1 is set and SLURM_STEP_ID is not"),
    "no tasks of the node": (without(srun(1), *ONE_NODE), "Slurm does not say how many of the 4 tasks this node has"),
    "tasks of the node": (srun(1) | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE=2(x does not say"),
    "SageMaker's host": (sagemaker("algo-9"), "SM_CURRENT_HOST=algo-9 is not one of SM_HOSTS="),
    "SageMaker's hosts": (sagemaker(SM_HOSTS="algo-1,algo-2"), "SM_HOSTS=algo-1,algo-2 is no JSON list of host names"),
    "a superscript": (torchrun("\u00b2", 4, 0, 2), "RANK missing or not a number"),
    "more digits than a number has": (torchrun("1" * 5000, 4, 0, 2), "RANK missing or not a number"),
    "a superscript of Slurm's": (srun(1, SLURM_LOCALID="\u00b2"), "SLURM_LOCALID=\u00b2, which srun sets, is not a"),
    "all by hand, and another rank": (
        without(openmpi(1, 4, 1, 2), "OMPI_COMM_WORLD_SIZE") | by_hand(1, 4, LOCAL_RANK="1"), "SIZE is not set",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_with_both_names(case):
    environment, text = REFUSED[case]
    with pytest.raises(UserError) as caught:
        read_launch(environment)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("deal", "text"),
    [
        (lambda rank: openmpi(rank, 6, rank // 2, 3), "use `mpirun --map-by slot`"),
        (lambda rank: srun(rank, "3(x2)", SLURM_NODEID=str(rank % 2), SLURM_LOCALID=str(rank // 2)), "--distribution"),
    ],
    ids=["mpirun", "srun"],
)
def test_one_rank_says_that_ranks_were_dealt_in_turn(deal, text, monkeypatch, capsys):
    said, statuses = [], []
    for rank in range(1, 5):  # 0 and 5 are where they belong
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_", "RANK", "WORLD_"))]:
                patch.delenv(name)
            for name, value in deal(rank).items():
                patch.setenv(name, value)
            statuses.append(train_lib.main([]))
        said.append(capsys.readouterr().err)
    assert statuses == [2] * 4 and text in said[0] and said[1:] == [""] * 3


def where(environment):
    return rendezvous(read_launch(environment), environment)


def test_where_rank_0_is():
    assert where(torchrun(1, 2, 1, 2)) == ("a", 1)
    host, port = where(srun(3))
    assert host == "node07" and 10_000 <= port < 30_000
    assert where(srun(0)) == (host, port)  # the same on every rank
    assert where(srun(0, SLURM_JOB_ID="4712"))[1] != port and where(srun(0, SLURM_STEP_ID="1"))[1] != port
    assert where(srun(3, MASTER_ADDR="x")) == ("x", port) and where(srun(3, MASTER_PORT="7")) == ("node07", 7)
    assert where(srun(1, "2", "node3"))[0] == "127.0.0.1"
    # The step of mpirun's daemons leaves out the first host.
    under_slurm = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_STEP_NODELIST": "a2"}
    assert where(openmpi(3, 4, 1, 2, **under_slurm))[0] == "a1"
    assert where(openmpi(1, 2, 1, 2)) == where(openmpi(0, 2, 0, 2)) and where(openmpi(1, 2, 1, 2))[0] == "127.0.0.1"
    other = openmpi(0, 2, 0, 2, PMIX_NAMESPACE="prterun-vm-1@1")
    assert where(other)[1] != where(openmpi(0, 2, 0, 2))[1]
    assert where(hydra(1, 2, 1, 2)) == where(hydra(0, 2, 0, 2))  # from the process above, which both have
    assert where(hydra(3, 4, 1, 2) | {"MASTER_ADDR": "h"}) == ("h", 29500)
    assert where(sagemaker()) == ("algo-1", 7777)
    assert where(sagemaker() | openmpi(9, 24, 1, 8))[0] == "algo-1"


def test_what_to_set_where_nothing_says_where_rank_0_is():
    for environment, how in ((openmpi(1, 4, 1, 2), "-x MASTER_ADDR=HOST"), (hydra(3, 4, 1, 2), "-genv MASTER_ADDR")):
        with pytest.raises(UserError, match=f"does not say where rank 0 runs: add `{how}"):
            where(environment)
    with pytest.raises(UserError, match=r"SLURM_STEP_NODELIST=n\[1- is no list of nodes: set MASTER_ADDR"):
        where(srun(0, nodes="n[1-"))
    for wrong in (without(torchrun(0, 2, 0, 2), "MASTER_PORT"), torchrun(0, 2, 0, 2) | {"MASTER_PORT": "\u00b2"}):
        with pytest.raises(UserError, match="do not say where rank 0 is"):
            where(wrong)


def test_what_was_set_by_hand_says_all_that_the_advice_asks_for():
    """The advice of the refusal, followed: the four numbers, and where rank 0 is."""
    part = without(openmpi(1, 4, 1, 2), "OMPI_COMM_WORLD_LOCAL_SIZE")
    with pytest.raises(UserError, match="or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and"):
        read_launch(part)
    whole = part | without(torchrun(1, 4, 1, 2), "TORCHELASTIC_RUN_ID")
    assert read_launch(whole).numbers == (1, 4, 1, 2) and where(whole) == ("a", 1)
    with pytest.raises(UserError, match="RANK=0 and OMPI_COMM_WORLD_RANK=1 contradict"):
        read_launch(openmpi(1, 4, 1, 2) | without(torchrun(0, 4, 0, 2), "TORCHELASTIC_RUN_ID"))


def test_accelerate_that_lost_processes_is_known_by_the_address_it_has_set():
    asked_for_two = {"ACCELERATE_DYNAMO_BACKEND": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(UserError, match="several processes and started one") as refused:
        read_launch(asked_for_two)
    assert "for one process unset MASTER_ADDR" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "host"),
    [("node[01-03,7],gpu-1", "node01"), ("a", "a"), ("b.c-d,a", "b.c-d"), ("rack[1-2]n[08-10]x", "rack1n08x")],
)
def test_first_host_of_a_node_list(text, host):
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "n[1-", "n1]", "n[a]", "n[]", "a,,b", "a b"])
def test_what_is_no_node_list(text):
    with pytest.raises(ValueError):
        first_host(text)


def test_counts_of_tasks():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1] and expand_counts("8") == [8]
    for text in ("", "2(x", "2x3", "-1"):
        with pytest.raises(ValueError):
            expand_counts(text)


def test_hosts_of_sagemaker():
    assert sagemaker_hosts(sagemaker()) == ["algo-1", "algo-2", "algo-3"] and sagemaker_hosts({}) == []


def test_the_local_rank_that_launchers_add_to_the_command_line():
    assert own_arguments(["--local_rank=1", "--x", "--local_rank=3"]) == ["--x", "--local_rank=3"]
    assert own_arguments(["--local-rank=0"]) == [] and own_arguments(["--local_rank", "1"]) == ["--local_rank", "1"]


def test_a_launch_says_who_is_main():
    assert Launch(0, 2).is_main and not Launch(1, 2).is_main
