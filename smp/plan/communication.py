"""Seconds and bytes of a collective from a device's links and its share of the host's network cards."""

from __future__ import annotations

from smp.plan.devices import DeviceRow

# Starting a collective, and each further rank and host of its ring: NCCL's latencies are of this size.
START, PER_RANK, PER_HOST = 20e-6, 1e-6, 8e-6


def ring_seconds(nbytes: float, ranks: int, on_host: int, row: DeviceRow) -> float:
    """Return the seconds of an all-gather or a reduce-scatter.

    A ring over full hosts enters and leaves each host once, through all cards that its ranks there share: with
    ``on_host`` ranks of the group on each host it has ``on_host`` shares of the network, up to the speed of the links.

    Args:
        nbytes: of the larger side: the gathered output, or the input that is reduced.
        ranks: of the group.
        on_host: ranks of the group on one host.
    """
    if ranks <= 1:
        return 0.0
    speed = row.links * row.efficiency.links
    if on_host < ranks:
        speed = min(speed, on_host * row.network * row.efficiency.network)
    return nbytes * (ranks - 1) / ranks / (speed * 1e9) + START + PER_RANK * on_host + PER_HOST * (ranks // on_host - 1)


def sent_bytes(kind: str, nbytes: int, ranks: int, on_host: int) -> tuple[int, int]:
    """Return the bytes that a rank sends inside its host and between hosts, of a ring; on average over the ranks."""
    sent = (2 if kind == "all_reduce" else 1) * nbytes * (1 if kind == "send" else (ranks - 1) / ranks)
    if on_host >= ranks:
        return round(sent), 0
    # Every rank talks to every other in an exchange of all with all; of a ring one link in `on_host` leaves the host.
    outside = (ranks - on_host) / (ranks - 1) if kind == "all_to_all" else 1 / on_host
    return round(sent * (1 - outside)), round(sent * outside)


def collective_seconds(kind: str, nbytes: float, ranks: int, on_host: int, row: DeviceRow) -> float:
    """Return the seconds of a collective by a data sheet's links and network.

    Args:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, or ``send`` to the next rank.
        nbytes, ranks, on_host: as :func:`ring_seconds` takes them; or what is sent.
    """
    network = row.network * row.efficiency.network
    if kind == "send":  # the last rank of a host sends to the next host alone
        speed = row.links * row.efficiency.links if on_host >= ranks else network
        return START + round(nbytes) / (speed * 1e9)
    if kind == "all_to_all" and on_host < ranks:
        return START + sent_bytes(kind, round(nbytes), ranks, on_host)[1] / (network * 1e9)
    # A reduction of all is a reduce-scatter and an all-gather.
    return (2 if kind == "all_reduce" else 1) * ring_seconds(nbytes, ranks, on_host, row)
