"""An MPI program: point to point, broadcast, gather-reduce-broadcast, and workers whose weights rank 0 averages.

mpirun -np 2 python examples/mpi_style.py                   # on torch.distributed over smddp
mpirun -np 2 python examples/mpi_style.py --api mpi4py      # the same program on mpi4py
"""

from __future__ import annotations

import common
import messages
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toy

import smp


def point_to_point(comm) -> None:
    if comm.rank == 0 and comm.size > 1:
        comm.send(np.array([0, 1, 2], dtype=np.intc), dest=1)
    elif comm.rank == 1:
        data = np.empty(3, dtype=np.intc)
        comm.recv(data, source=0)
        print(f"Hello I am rank 1, I received some data: {data}")


def broadcast(comm) -> None:
    data = np.arange(10, dtype=np.intc) if comm.rank == 0 else np.zeros(10, dtype=np.intc)
    comm.broadcast(data)
    print(f"Data at rank {comm.rank} {data}")


def average(comm, array: np.ndarray) -> np.ndarray:
    """Gather on rank 0, take the mean there, send it to all."""
    rows = comm.gather(array)
    mean = np.empty(array.shape, dtype=np.float64) if rows is None else rows.mean(axis=0, dtype=np.float64)
    comm.broadcast(mean)
    return mean


def train(args, comm, log: common.Log) -> None:
    """Every worker trains on its own data; after each step all go on from the mean of the weights."""
    torch.manual_seed(0)
    model = toy.Model(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    dataset = toy.RandomDataset(args.batch * comm.size)
    mine = slice(comm.rank * args.batch, (comm.rank + 1) * args.batch)
    for _ in range(args.steps):
        loss = F.mse_loss(model(dataset.inputs[mine]), dataset.targets[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        mean = torch.from_numpy(average(comm, weights)).float()
        torch.nn.utils.vector_to_parameters(mean, model.parameters())
        log.step(loss)


def main() -> None:
    parser = common.parser(__doc__, steps=40, batch=30, width=64)
    parser.add_argument("--api", choices=("torch", "mpi4py"), default="torch")
    args = parser.parse_args()
    device = smp.init_process_group(args.backend)  # finds its place in what mpirun (or torchrun, srun) sets
    comm = messages.OnTorch(device) if args.api == "torch" else messages.OnMpi4py()
    if comm.rank == 0:
        print("Number of MPI processes that will talk to each other:", comm.size)
    point_to_point(comm)
    broadcast(comm)
    mean = average(comm, np.full(10, comm.rank, dtype=np.intc))
    print(f"I am rank {comm.rank}, my avg is: {mean}")
    log = common.Log(args, args.batch * comm.size, "samples")
    train(args, comm, log)
    log.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
