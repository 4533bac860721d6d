"""The CUDA path on a CPU build of torch: fake tensors on a device of type ``cuda``, audited operation by operation.

A test starts :mod:`tests.cuda_path.job` in a process of its own, which loads a shim before torch, and reads its report.
Blind: values, races, the choice of kernels, real memory.
"""
