"""What holds the memory, by category: at the peak of a step, and over it."""

from smp.memory_profile.categories import CATEGORIES
from smp.memory_profile.profile import (
    MemoryProfile,
    Snapshot,
    Timeline,
    is_out_of_memory,
    profile_memory,
    rank_table,
)

__all__ = [
    "CATEGORIES",
    "MemoryProfile",
    "Snapshot",
    "Timeline",
    "is_out_of_memory",
    "profile_memory",
    "rank_table",
]
