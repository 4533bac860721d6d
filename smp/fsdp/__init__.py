"""FSDP1's constructor and methods over torch's ``fully_shard``: a script changes its import and runs."""

from smp.fsdp.delayed import DelayedParamIniter
from smp.fsdp.fully_sharded import fully_shard
from smp.fsdp.meshes import follow
from smp.fsdp.state_dicts import FullStateDictConfig
from smp.fsdp.wrapper import FullyShardedDataParallel

__all__ = ["DelayedParamIniter", "FullStateDictConfig", "FullyShardedDataParallel", "follow", "fully_shard"]
