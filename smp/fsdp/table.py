"""What becomes of each of FSDP1's constructor arguments and methods: the table of ``docs/from_fsdp1.md``.

The tests compare it with the signature and the public methods of torch's class, and the page with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_BEGIN, _END = "<!-- table: {} -->", "<!-- end of table -->"


class Row(NamedTuple):
    """One line."""

    name: str
    kept: str  # yes, no effect, or refused
    what: str


ARGUMENTS = (
    Row(
        "module",
        "yes",
        "changed in place and returned, a unit as it is; `.module` is the module itself: a loop over it never ends",
    ),
    Row("process_group", "yes", "a group, or (group to shard over, group to replicate over) for hybrid sharding"),
    Row("sharding_strategy", "yes", "all five, as torch's enum or by name; see *Over which ranks* below"),
    Row("cpu_offload", "yes", "accumulation without `no_sync` is right, too"),
    Row(
        "auto_wrap_policy",
        "yes",
        "every kind; torch's own code runs it. What cannot be called (`ModuleList`) is no unit",
    ),
    Row(
        "backward_prefetch",
        "yes",
        "`BACKWARD_PRE` as is; with `BACKWARD_POST` as with `None` a unit is gathered when its backward begins",
    ),
    Row("mixed_precision", "yes", "`keep_low_precision_grads=True` is refused; the rest as is, `buffer_dtype` at once"),
    Row("ignored_modules", "yes", "neither sharded nor reduced"),
    Row("param_init_fn", "yes", "called unit by unit, so that no rank holds the whole model; tied weights stay tied"),
    Row("device_id", "yes", "must be the device that the process computes on; not needed"),
    Row("sync_module_states", "yes", "also on CPUs, and from a rank 0 with real weights to others on the meta device"),
    Row("forward_prefetch", "yes", "in the order of the first forward"),
    Row("limit_all_gathers", "no effect", "the gathers in flight are always bounded"),
    Row("use_orig_params", "no effect", "parameters are always the model's own, so `True`"),
    Row("ignored_states", "yes", "modules or parameters"),
    Row("device_mesh", "yes", "1-D, or (replicate, shard) for hybrid sharding"),
)

METHODS = (
    Row("module", "yes", "the module itself, or its own submodule of that name"),
    Row("forward", "yes", "the model's own: call the module, `model(x)`; `model.forward(x)` gathers nothing and fails"),
    Row("named_parameters", "yes", "by the plain model's names, in and outside of `summon_full_params`"),
    Row("named_buffers", "yes", "by the plain model's names"),
    Row("apply", "yes", "with whole parameters, unit by unit"),
    Row(
        "clip_grad_norm_",
        "yes",
        "any p above 0; the norm is fp32 or finer. Not finite, it scales nothing. Refused after `no_sync` alone",
    ),
    Row(
        "no_sync",
        "yes",
        "of the outermost module; whole gradients accumulate in `reduce_dtype`, and `grad` is zeros until then",
    ),
    Row("state_dict", "yes", "by the type that is set; the plain model's keys"),
    Row("load_state_dict", "yes", "whole tensors, DTensors, or FSDP1's own `ShardedTensor`"),
    Row(
        "state_dict_type",
        "yes",
        "FULL (default) and SHARDED; LOCAL is refused. The types before return also after an error",
    ),
    Row("set_state_dict_type", "yes", "the same"),
    Row("get_state_dict_type", "yes", "the same"),
    Row(
        "optim_state_dict",
        "yes",
        "FSDP1's format: by names, whole or as DTensors; `rank0_only` is `group`'s first rank",
    ),
    Row(
        "optim_state_dict_to_load",
        "yes",
        "also what FSDP1 saved, and `load_sharded_optimizer_state_dict`'s; `rank0_only` is `group`'s first rank; "
        "`is_named_optimizer=True` is refused",
    ),
    Row("full_optim_state_dict", "yes", "`optim_input` is refused: give `optim`"),
    Row("sharded_optim_state_dict", "yes", "DTensors"),
    Row("shard_full_optim_state_dict", "yes", "`optim_input` is refused: give `optim`"),
    Row("flatten_sharded_optim_state_dict", "yes", "nothing is flat: DTensors stay"),
    Row("scatter_full_optim_state_dict", "yes", "from `group`'s first rank; `optim_input` is refused: give `optim`"),
    Row("rekey_optim_state_dict", "yes", "`optim_input` is refused: give `optim`"),
    Row(
        "summon_full_params",
        "yes",
        "a forward inside ends it, and with `rank0_only` is refused; gradients (`with_grads`) are to be read",
    ),
    Row("fsdp_modules", "yes", "outer ones first"),
    Row("check_is_root", "yes", "changes nothing"),
    Row(
        "register_comm_hook", "yes", "`hook(state, gradients, output)`; refused for replicated units (NO_SHARD, hybrid)"
    ),
)


def markdown(rows: tuple[Row, ...]) -> str:
    """A Markdown table."""
    lines = ["| FSDP1 | here | |", "|---|---|---|"]
    lines += [f"| `{row.name}` | {row.kept} | {row.what} |" for row in rows]
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """A page with its tables as they are here."""
    for name, rows in (("arguments", ARGUMENTS), ("methods", METHODS)):
        begin = _BEGIN.format(name)
        before, _, rest = page.partition(begin)
        _, end, after = rest.partition(_END)
        page = f"{before}{begin}\n{markdown(rows)}\n{end}{after}"
    return page


def write(path: Path) -> None:
    """Bring the page's tables up to date."""
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
