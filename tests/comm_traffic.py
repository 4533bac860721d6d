"""Random calls in groups that overlap, come and go, several in flight, each compared with what must come out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tests.comm_calls import Call, prepare
from tests.comm_cases import DIMENSIONS, Case

FLYING, GROUPS = 8, 4


class Traffic:
    """What one rank does; every rank of the job makes one alike.

    Args:
        seed: of the calls; only the order of waiting differs between ranks.
        sizes: in elements, to choose from.
        life: after how many calls a group is replaced.
    """

    def __init__(self, seed: int, sizes: Sequence[int], *, life: int = 100):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.calls, self.elements = 0, 0
        self._sizes, self._life, self._seed = sizes, life, seed
        self._shared, self._own = random.Random(seed), random.Random(seed + 1 + self.rank)
        self._flying: list[tuple[Case, Call, Any, Any]] = []
        self._groups: list[tuple[list[int], Any]] = []
        self._number = 0

    def _new_group(self) -> tuple[list[int], Any]:
        size = self._shared.randint(min(2, self.world), self.world)
        members = sorted(self._shared.sample(range(self.world), size))
        return members, dist.new_group(members, backend="smddp")

    def step(self) -> None:
        """Make one call, if this rank is in its group, and wait for some.

        Raises:
            AssertionError: a result is wrong; the message has the case.
        """
        self._number += 1
        while len(self._groups) < GROUPS:
            self._groups.append(self._new_group())
        if self._number % self._life == 0:
            self._replace(self._shared.randrange(len(self._groups)))
        members, group = self._shared.choice(self._groups)
        case = self._choose()
        if self.rank in members:
            call = prepare(case, members.index(self.rank), members, 0)
            self._flying.append((case, call, group, call.run(group, case.asynchronous)))
            self.calls += 1
            self.elements += int(case.size)
        while len(self._flying) > FLYING or (self._flying and self._own.random() < 0.2):
            self._land(self._own.randrange(len(self._flying)))

    def finish(self) -> None:
        """Wait for all."""
        while self._flying:
            self._land(self._own.randrange(len(self._flying)))

    def close_groups(self) -> None:
        """Wait for all, and give up the groups; the next :meth:`step` makes new ones."""
        self.finish()
        for members, group in self._groups:
            if self.rank in members:
                dist.destroy_process_group(group)
        self._groups = []

    def _choose(self) -> Case:
        while True:
            chosen = {name: self._shared.choice(values) for name, values in DIMENSIONS.items()}
            size = self._shared.choice(self._sizes)
            case = Case(**{**chosen, "size": size}, seed=1000 * self._seed + self._number)
            if case.possible:
                return case

    def _land(self, index: int) -> None:
        case, call, _, work = self._flying.pop(index)
        if work is not None:
            work.wait()
        assert call.right(), f"wrong on rank {self.rank} of {self.world}, call {self._number}: {case}"

    def _replace(self, index: int) -> None:
        members, group = self._groups[index]
        for place in reversed(range(len(self._flying))):
            if self._flying[place][2] is group:
                self._land(place)
        if self.rank in members:
            dist.destroy_process_group(group)
        self._groups[index] = self._new_group()
