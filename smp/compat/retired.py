"""Flags of SMP v2 that did nothing there, and flags of ours that are gone: refused with a sentence."""

RETIRED = {
    "data_type": "it was never passed on; choose the source with --dataset_type",
    "framework": "it was never read; leave it out",
    "same_seed": "it was never read; --seed sets the seed, and ranks that hold different data draw different dropout",
    "straggler_ratio": "leave it out; `py-spy top` and --profile_nsys show which rank does not wait in collectives: "
    "it is the slow one. --watchdog_timeout ends a run whose rank hangs",
}
