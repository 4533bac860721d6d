"""Device specs: peaks and efficiencies from data sheets, and those that `smp plan --calibrate` has measured.

Every row says which of the two it is, when it was made and on what. A data sheet's peaks are not reached; the
efficiencies with them are the share that published measurements reach, each with its source here:

- products: 0.9 of the fastest product of any shape that was measured on the card: A100 271 of 312 TFLOP/s, H100 and
  H200 794 of 989, B200 1745 of 2250 (S. Bekman, Machine Learning Engineering, "Maximum Achievable FLOPS"). A step's
  own shapes are not the best ones, and cards that draw more power than they may in long products slow down.
- attention: FlashAttention-2 with a causal mask, counted without the hidden half: A100 0.50 forward and 0.42 backward
  (arXiv:2307.08691, section 4.1), H100 and later 0.35 and 0.30 (arXiv:2407.08608: 35 % of an H100).
- of a CPU only its cores are known: 30 GFLOP/s, 6 GB/s of memory and 1 GB/s to other processes each.
- memory 0.80 and links and networks 0.75: usual of STREAM-like kernels and of NCCL's large rings.
- nothing was measured or compared of A10G, L4, L40S, the RTX cards and MI300X: their products are taken as B200's, and
  attention of NVIDIA's among them as A100's, whose kernels they run.

Peaks and bandwidths of these, from the vendors:

- L4, L40S, RTX 4090: https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf,
  https://www.nvidia.com/en-us/data-center/l40s
- A10G: https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
- RTX A6000, RTX 6000 Ada, RTX PRO 6000 Blackwell: https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf
- RTX 5090: https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
- MI300X: https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp.environment import devices_folder
from smp.environment.threads import available_cores
from smp.errors import UserError
from smp.json_input import read_object
from smp.plan import document

if TYPE_CHECKING:  # `smp plan` starts a process that plans before it imports torch itself
    import torch

DATA_SHEET, MEASURED = "data sheet", "measured"
_FP8 = 8, 9  # capability of the first GPUs with fp8, whose peak is twice that of bf16 in all data sheets
SCHEMA = 5  # of rows; earlier ones were measured otherwise
# GB/s that a device can send at once, each way, when the eight devices of a host share its cards.
# Of predicted seconds on CPUs, without and with a calibration: wide by intent, no page has measured them.
_ANY_CPU, _MEASURED_CPU = (0.3, 3.0), (0.5, 2.0)
NETWORKS = {"efa400": 400 / 8 / 8, "efa3200": 3200 / 8 / 8, "ib400": 400 / 8}


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that are reached."""

    products: float = 0.70
    attention_forward: float = 0.35
    attention_backward: float = 0.30
    memory: float = 0.80
    links: float = 0.75
    network: float = 0.75


@dataclasses.dataclass(frozen=True)
class DeviceRow:
    """The speed of one kind of device, or of all cores of a machine.

    Attributes:
        name: as ``--device`` takes it.
        peak: TFLOP/s of dense bf16 products.
        fp32: TFLOP/s of fp32 products; default: a sixteenth, as smp leaves TF32 off like torch (A100 19.5 of 312, H100
            67 of 989).
        bandwidth: of the device's memory, TB/s.
        memory: GiB that the driver reports.
        links: GB/s each way to another device of the host.
        network: GB/s each way to another host, this device's share.
        host_link: GB/s each way to the host's memory.
        capability: CUDA's compute capability; None on a CPU.
        efficiency: shares of the peaks that are reached.
        host_us: microseconds of the host for an eager operation with its autograd.
        factor: what times were divided by to match ledgers; ``runs``: how many; ``low``, ``high``: 10th and 90th
            percentile of measured over predicted seconds, from 4 runs on.
        source: ``data sheet`` or ``measured``.
        date, on: of the row: the day, and the machine with its versions.
        is_compared: whether runs on such a device were compared with the row.
    """

    name: str
    peak: float = 0.0
    fp32: float = 0.0
    bandwidth: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    network: float = 0.0
    host_link: float = 0.0
    capability: tuple[int, int] | None = None
    efficiency: Efficiency = Efficiency()
    host_us: float = 8.0
    factor: float = 1.0
    runs: int = 0
    low: float | None = None
    high: float | None = None
    source: str = DATA_SHEET
    date: str = "2026-11-22"
    on: str = ""
    is_compared: bool = True

    @property
    def is_gpu(self) -> bool:
        """Whether kernels and collectives overlap with the host and each other."""
        return self.capability is not None

    @property
    def range(self) -> tuple[float, float]:
        """Return the seconds to expect, lowest and highest, for one predicted second."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        if self.is_gpu:
            return (0.75, 1.25) if self.is_compared or self.source == MEASURED else (0.5, 2.0)
        return _MEASURED_CPU if self.source == MEASURED else _ANY_CPU

    @property
    def described(self) -> str:
        """Return a phrase for a person: where the row's numbers come from and how far to trust them."""
        sheet = DEVICES.get(self.name)
        published = "published " if sheet is not None and (sheet.factor, sheet.runs) == (self.factor, self.runs) else ""
        fitted = f", scaled to {self.runs} {published}runs" if self.runs else ""
        if self.source == MEASURED:
            return f"measured {self.date} on {self.on}{fitted}"
        if not self.is_gpu:
            return f"assumed constants of a core, not measured here{fitted}: `smp plan --calibrate` does"
        if not self.is_compared:
            return f"data-sheet constants of {self.name}, not measured, here or on any such device{fitted}: rough"
        return f"data-sheet constants of {self.name}, not measured here{fitted}: within 25 %"

    def flops(self, value_bytes: int) -> float:
        """Return FLOP/s of products of fp8 (1), bf16 (2) or fp32 (4 bytes); fp8 of devices without it, as of bf16."""
        if value_bytes == 1:
            return 1e12 * self.peak * (2 if (self.capability or (0, 0)) >= _FP8 else 1)
        return 1e12 * (self.peak if value_bytes == 2 else self.fp32 or self.peak / 16)

    def shared_by(self, processes: int) -> DeviceRow:
        """Return the row of one of several processes that share the cores of a machine; a GPU is not shared."""
        if self.is_gpu:
            return self
        divided = {name: getattr(self, name) / processes for name in ("peak", "fp32", "bandwidth", "memory", "links")}
        return dataclasses.replace(self, **divided, network=min(self.network, divided["links"]))

    def refitted(self, ratios: Sequence[float]) -> DeviceRow:
        """Return the row with a factor and a range from ledgers.

        Args:
            ratios: measured seconds of a step over those that this row predicted.
        """
        ordered, count = sorted(ratios), len(ratios)
        if not count:
            return self
        median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        known = count >= 4  # fewer have no percentiles worth the name
        low, high = ordered[round(0.1 * (count - 1))] / median, ordered[round(0.9 * (count - 1))] / median
        return dataclasses.replace(
            self, factor=self.factor / median, runs=count, low=low if known else None, high=high if known else None
        )


@dataclasses.dataclass(frozen=True)
class _Peak:
    """Dense TFLOP/s (no sparsity, sums in fp32) of one device's data sheet; None: it has none, or none is published."""

    bf16: float | None
    fp16: float | None
    tf32: float | None = None
    fp32: float | None = None


# By the whole device name: a part of a card (MIG), or a variant that is not here, has another peak.
_PEAKS = {
    r"B200": _Peak(2250, 2250, 1125),
    r"H200( 141GB HBM3e)?|H100 80GB HBM3|H100 SXM5 80GB": _Peak(989, 989, 494.7, 66.9),
    r"H(100|200) NVL": _Peak(835.5, 835.5, 417.5, 60),
    r"H100 PCIe": _Peak(756, 756, 378, 51.2),
    r"A100[- ](SXM4-|PCIE-|SXM-)?(40|80)GB( PCIe)?": _Peak(312, 312, 156, 19.5),
    r"A10": _Peak(125, 125, 62.5, 31.2),
    r"A10G": _Peak(70, 70),
    r"L40S": _Peak(362, 362, 183, 91.6),
    r"L4": _Peak(121, 121, 60, 30.3),
    r"V100-SXM2-(16|32)GB": _Peak(None, 125, None, 15.7),
    r"V100-PCIE-(16|32)GB": _Peak(None, 112, None, 14),
    r"T4": _Peak(None, 65, None, 8.1),
    r"GeForce RTX 4090": _Peak(165.2, 165.2, 82.6, 82.6),
    r"GeForce RTX 5090": _Peak(209.5, 209.5, 104.8, 104.8),
    r"RTX A6000": _Peak(154.8, 154.8, 77.4, 38.7),
    r"RTX 6000 Ada Generation": _Peak(364.2, 364.2, 182.1, 91.1),
    r"RTX PRO 6000 Blackwell Workstation Edition": _Peak(503.8, 503.8, 251.9, 126),
    r"AMD Instinct MI300X( OAM)?": _Peak(1307.4, 1307.4, 653.7, 163.4),
}


def peak_flops(device_name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Return the FLOP/s of one device in dense matrix products, or None where they are not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.
        tf32: whether fp32 products may run in TF32 (``torch.get_float32_matmul_precision() != "highest"``).
    """
    formats = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "tf32" if tf32 else "fp32"}
    tera = _tera(device_name, formats.get(str(dtype), ""))
    return None if tera is None else tera * 1e12


def _tera(device_name: str, kind: str) -> float | None:
    model = device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    return next((getattr(peak, kind, None) for name, peak in _PEAKS.items() if re.fullmatch(name, model)), None)


def _gpu(
    name: str, sheet: str, bandwidth: float, memory: float, links: float, network: float, **rest: Any
) -> DeviceRow:
    peak = _tera(sheet, "bf16")
    assert peak is not None, sheet
    host_link = 32 if rest["capability"] < (9, 0) else 64  # PCIe 4 and 5
    fp32 = 0.0 if rest.get("is_compared", True) else _tera(sheet, "fp32") or 0.0
    return DeviceRow(
        name, peak, fp32, bandwidth, memory, links, network, host_link, on="the vendor's data sheet", **rest
    )  # fmt: skip


_AMPERE = {"capability": (8, 0), "efficiency": Efficiency(0.78, 0.50, 0.42)}
_HOPPER = {"capability": (9, 0), "efficiency": Efficiency(0.72)}
# Without NVLink: other devices of a host are reached over PCIe, which GeForce cards share with the host's memory.
_PCIE = {"efficiency": Efficiency(0.70, 0.50, 0.42), "is_compared": False}
# The factors are those of published runs (benchmarks/plan.py published): other code, so the range stays a data sheet's.
_ROWS = (
    _gpu("a100_40gb", "A100-SXM4-40GB", 1.555, 39.4, 300, 25, **_AMPERE, factor=0.96, runs=78),
    _gpu("a100_80gb", "A100-SXM4-80GB", 2.039, 79.1, 300, 25, **_AMPERE, factor=0.97, runs=61),
    _gpu("h100", "H100 80GB HBM3", 3.35, 79.1, 450, 50, **_HOPPER, factor=0.94, runs=70),
    _gpu("h200", "H200", 4.8, 139.8, 450, 50, **_HOPPER),
    _gpu("b200", "B200", 8.0, 178.4, 900, 50, capability=(10, 0)),
    # Networks as of AWS's hosts of eight (g5, g6: 100 Gb/s, g6e: 400); of workstations 10 Gb/s.
    _gpu("a10g", "A10G", 0.6, 22.0, 32, 1.56, capability=(8, 6), **_PCIE),
    _gpu("l4", "L4", 0.3, 22.0, 32, 1.56, capability=(8, 9), **_PCIE),
    _gpu("l40s", "L40S", 0.864, 44.3, 32, 6.25, capability=(8, 9), **_PCIE),
    _gpu("rtx_4090", "GeForce RTX 4090", 1.008, 23.5, 32, 1.25, capability=(8, 9), **_PCIE),
    _gpu("rtx_5090", "GeForce RTX 5090", 1.792, 31.3, 64, 1.25, capability=(12, 0), **_PCIE),
    _gpu("rtx_a6000", "RTX A6000", 0.768, 47.4, 32, 1.25, capability=(8, 6), **_PCIE),
    _gpu("rtx_6000_ada", "RTX 6000 Ada Generation", 0.96, 47.4, 32, 1.25, capability=(8, 9), **_PCIE),
    _gpu(
        "rtx_pro_6000",
        "RTX PRO 6000 Blackwell Workstation Edition",
        1.792,
        94.9,
        64,
        1.25,
        capability=(12, 0),
        **_PCIE,
    ),
    # ROCm's torch calls its capability so; seven links of 64 GB/s each way.
    _gpu("mi300x", "AMD Instinct MI300X", 5.3, 191.5, 448, 50, capability=(9, 4), is_compared=False),
)
_CORES = available_cores()
# Without instructions for bf16 its products are slower than those of fp32.
_CPU = DeviceRow(
    "cpu", 0.01 * _CORES, 0.03 * _CORES, 0.006 * _CORES, 0.0, 1.0 * _CORES, 1.0, host_us=25, source="assumed", on="any",
    efficiency=Efficiency(1, 0.5, 0.4, 1, 1, 1),
)  # fmt: skip
DEVICES: Mapping[str, DeviceRow] = {row.name: row for row in (*_ROWS, _CPU)}
# As people write them, without what is between words.
_SPELT = {name.replace("_", ""): name for name in DEVICES} | {
    "4090": "rtx_4090", "5090": "rtx_5090", "a6000": "rtx_a6000", "6000ada": "rtx_6000_ada",
    "rtx6000blackwell": "rtx_pro_6000", "rtxpro6000blackwell": "rtx_pro_6000",
}  # fmt: skip


def plain_name(driver: str) -> str:
    """Return the name of the row of a device that its driver calls so: ``h200`` of ``NVIDIA H200``."""
    return re.sub(r"[^a-z0-9]+", "_", driver.lower().removeprefix("nvidia "))


def sheet_row(driver: str) -> DeviceRow | None:
    """Return the data sheet's row of a device by its driver's name, such as ``NVIDIA H100 80GB HBM3``, or None.

    A part of a card (MIG), or a variant with other links or another peak, has none.
    """
    words, peak = set(plain_name(driver).split("_")), _tera(driver, "bf16")
    if peak is None or "pcie" in words:
        return None
    return next((row for row in _ROWS if words >= {*row.name.split("_")} and row.peak == peak), None)


def device_row(name: str) -> DeviceRow:
    """Return the row of a device.

    Args:
        name: of a data sheet's row or one of the user's folder, which has precedence; the device's by its driver; or
            the path of a row's file.

    Raises:
        UserError: there is no such row, or its file cannot be read.
    """
    if name.endswith(".json"):
        return read_row(Path(name))
    sheet = sheet_row(name) or DEVICES.get(_SPELT.get(plain_name(name).replace("_", ""), ""))
    for alias in (name, plain_name(name), *([sheet.name] if sheet else [])):
        if (path := devices_folder() / f"{alias}.json").exists():
            return read_row(path)
    if sheet:
        return sheet
    known = dict.fromkeys([*DEVICES, *sorted(file.stem for file in devices_folder().glob("*.json"))])
    if alike := [each for each in known if each.startswith(f"{plain_name(name)}_")]:
        raise UserError(f"--device {name} is not one device: say which, {' or '.join(alike)}")
    raise UserError(
        f"--device {name} is not known: give one of {', '.join(known)}, the path of a spec's JSON file, or measure the "
        f"device at hand with `smp plan --calibrate`"
    )


def network_share(text: str) -> float:
    """Return GB/s each way between hosts for one device.

    Args:
        text: a name of ``NETWORKS`` (cards of a host with eight devices; ``ib400``: one card a device), or a number.

    Raises:
        UserError: neither.
    """
    if text in NETWORKS:
        return NETWORKS[text]
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise UserError(
            f"--network {text} is not known: give {', '.join(NETWORKS)}, or the GB/s that each device can send to "
            f"other hosts, such as 50"
        )
    return share


def read_row(path: Path) -> DeviceRow:
    """Read the row of a device from a JSON file.

    Raises:
        UserError: it cannot be read, or is no row.
    """
    try:
        content = read_object(path)
        if content.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        efficiency = Efficiency(**content.pop("efficiency", {}))
        capability = content.pop("capability", None)
        row = DeviceRow(**content, efficiency=efficiency, capability=tuple(capability) if capability else None)
        if not min(row.peak, row.bandwidth, row.factor, *dataclasses.astuple(efficiency)) > 0:
            raise ValueError("its peak, bandwidth, factor and efficiencies must be above 0")
        return row
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no device spec: {error}: write it anew with `smp plan --calibrate`, or give a name"
        ) from None


def write_row(row: DeviceRow, path: Path) -> None:
    """Write the row of a device as JSON; a reader sees the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document.write({"schema": SCHEMA, **dataclasses.asdict(row)}, path)
