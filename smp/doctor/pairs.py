"""Pairs of ranks: who meets whom and when, what they measure, and which pair is slow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

SLOW_SHARE = 0.5  # of the median pair's bandwidth
_FEWEST = 3  # pairs, for a median that says something


def partners(size: int) -> list[list[int]]:
    """In each round, every rank's partner, or -1: after all rounds each has met every other one.

    The circle method: rank 0 stays, the others move on by one place.
    """
    seats = list(range(size)) + ([-1] if size % 2 else [])
    rounds = []
    for _ in range(len(seats) - 1):
        found = [-1] * size
        for a, b in zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True):
            if a >= 0 and b >= 0:
                found[a], found[b] = b, a
        rounds.append(found)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


class Pairs:
    """What was measured of the pairs of ``size`` ranks.

    Attributes:
        latency: seconds of a small message, for each pair at :meth:`place`; 0 where it was not measured.
        speed: bytes per second of large ones.

    Args:
        size: ranks.
        hosts: for each rank what names its host.
    """

    def __init__(self, size: int, hosts: Sequence[str]):
        self.size, self._hosts = size, list(hosts)
        self.latency, self.speed = [0.0] * size**2, [0.0] * size**2

    def place(self, a: int, b: int) -> int:
        """Where a pair's numbers are."""
        return min(a, b) * self.size + max(a, b)

    def note(self, rank: int, other: int, latency: float, speed: float) -> None:
        """Keep a measurement; the lower rank's counts."""
        if rank < other:
            self.latency[self.place(rank, other)], self.speed[self.place(rank, other)] = latency, speed

    def keep_better(self, a: int, b: int, again: Pairs) -> None:
        """Take another measurement of a pair if it is better."""
        place = self.place(a, b)
        self.speed[place] = max(self.speed[place], again.speed[place])
        self.latency[place] = min(self.latency[place], again.latency[place])

    def measured(self, *, same_host: bool | None = None) -> list[tuple[int, int]]:
        """The pairs that have numbers; of one host, of two, or all."""
        return [
            (a, b)
            for a in range(self.size)
            for b in range(a + 1, self.size)
            if self.speed[self.place(a, b)] > 0 and same_host in (None, self._hosts[a] == self._hosts[b])
        ]

    def median(self, *, same_host: bool) -> float:
        """The median pair's bytes per second: the higher one of two, as a slow rank spoils many pairs."""
        return statistics.median_high(self.speed[self.place(*pair)] for pair in self.measured(same_host=same_host))

    def as_rows(self) -> list[dict[str, Any]]:
        """For the report."""
        return [
            {
                "ranks": [a, b],
                "same_host": self._hosts[a] == self._hosts[b],
                "latency_seconds": self.latency[self.place(a, b)],
                "bytes_per_second": self.speed[self.place(a, b)],
            }
            for a, b in self.measured()
        ]

    def summary(self) -> str:
        """The median of the pairs of one host and of two, and the slowest one."""
        parts = []
        for same_host, what in ((True, "one host"), (False, "two hosts")):
            if pairs := self.measured(same_host=same_host):
                latency = statistics.median(self.latency[self.place(*pair)] for pair in pairs)
                slowest = min(pairs, key=lambda pair: self.speed[self.place(*pair)])
                of = (
                    "" if len(pairs) == 1 else f" (slowest: ranks {slowest[0]} and {slowest[1]}, {self._text(slowest)})"
                )
                parts.append(
                    f"{len(pairs)} pair(s) of {what}: {self.median(same_host=same_host) / (1 << 30):.2g} GiB/s, "
                    f"{latency * 1e6:.0f} µs{of}"
                )
        return "; ".join(parts)

    def _text(self, pair: tuple[int, int]) -> str:
        return f"{self.speed[self.place(*pair)] / (1 << 30):.2g} GiB/s"

    def complaints(self, slow: Sequence[tuple[int, int]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """A sentence and its numbers for each slow pair, or for the one rank that all of them have in common."""
        common = set(slow[0]).intersection(*slow) if len(slow) > 1 else set()
        for pair in slow[:1] if len(common) == 1 else slow:
            same = self._hosts[pair[0]] == self._hosts[pair[1]]
            median = self.median(same_host=same)
            if len(common) == 1:
                rank = next(iter(common))
                others = ", ".join(str(a + b - rank) for a, b in slow[:8])
                who, ranks = f"rank {rank} with rank(s) {others}", [rank]
            else:
                who, ranks = f"ranks {pair[0]} and {pair[1]}", list(pair)
            look = "the processor cores they run on" if same else "the network between their hosts, cable by cable,"
            yield (
                f"{who}: messages pass at {self._text(pair)}, the median of such pairs is {median / (1 << 30):.2g} "
                f"GiB/s: look at {look} and at what else runs there",
                {
                    "ranks": ranks,
                    "pairs": [list(each) for each in slow],
                    "bytes_per_second": self.speed[self.place(*pair)],
                    "median_bytes_per_second": median,
                },
            )


def slow_pairs(pairs: Pairs) -> list[tuple[int, int]]:
    """Pairs below half the median of their kind (of one host, or of two), the slowest first."""
    found: list[tuple[int, int]] = []
    for same_host in (True, False):
        of_kind = pairs.measured(same_host=same_host)
        if len(of_kind) >= _FEWEST:
            limit = SLOW_SHARE * pairs.median(same_host=same_host)
            found += [pair for pair in of_kind if pairs.speed[pairs.place(*pair)] < limit]
    return sorted(found, key=lambda pair: pairs.speed[pairs.place(*pair)])
