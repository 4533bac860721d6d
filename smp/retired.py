"""Flags of SMP v2 that did nothing there, or whose work is done by another flag here: refused with a sentence."""

RETIRED = {
    "data_type": "it was never passed on; choose the source with --dataset_type",
    "framework": "it was never read; leave it out",
    "same_seed": "it was never read; --seed sets the seed, and ranks that hold different data draw different dropout",
}
