"""Stand-ins for what ``torch.cuda`` has in C++, for a process that plans; nothing runs on a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

Log = Callable[[str], None]
_ignore: Log = lambda what: None  # noqa: E731
log: Log = _ignore  # of waits and synchronisations; replaced by whoever counts them


class Stream:
    """A stream, which only has a name."""

    count = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        import torch

        self.device, self.priority, Stream.count = torch.device("cuda", 0), priority, Stream.count + 1
        self.name = f"stream {Stream.count}"
        self.cuda_stream = self.stream_id = Stream.count

    def wait_stream(self, other: Stream) -> None:
        """Do nothing."""

    def wait_event(self, event: Event) -> None:
        """Do nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event, recorded now."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Log it."""
        log("synchronize stream")

    def query(self) -> bool:
        """Return that nothing is left to do."""
        return True

    def __enter__(self) -> Stream:
        _streams.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams.stack.pop()


class Event:
    """An event; ``age`` counts the steps since it was recorded: waiting for an old one lets the host run ahead."""

    now = 0

    def __init__(self, *_: Any, **__: Any):
        self.recorded: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Note the step."""
        self.recorded = Event.now

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Log it."""
        if self.recorded is not None:
            age = Event.now - self.recorded
            log(f"synchronize event of {age} step(s) ago" if age else "synchronize event")

    def query(self) -> bool:
        """Return that nothing is left to do."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return some milliseconds."""
        return 1.0


class _Streams(threading.local):
    def __init__(self) -> None:
        self.stack = [default]


default: Stream
_streams: _Streams


def current_stream(device: Any = None) -> Stream:
    """Return the innermost stream of this thread."""
    return _streams.stack[-1]


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Make a stream the current one in the ``with`` block."""
    with chosen or contextlib.nullcontext():
        yield


def install(*, devices: int, memory: int = 80 << 30, capability: tuple[int, int] = (9, 0)) -> None:
    """Replace the parts of ``torch.cuda`` that need a GPU, once in a process.

    Args:
        devices: of this host.
        memory: bytes of each.
        capability: of each, major and minor.
    """
    global default, _streams
    import torch

    default = Stream()
    _streams = _Streams()
    cpu_state = torch.get_rng_state()
    properties = type("Properties", (), {
        "name": "NVIDIA H100 80GB HBM3", "major": capability[0], "minor": capability[1], "total_memory": memory,
        "multi_processor_count": 132,
        "uuid": "0", "warp_size": 32, "gcnArchName": "",
    })()  # fmt: skip
    runtime = type("Runtime", (), {
        "cudaHostRegister": lambda self, address, nbytes, flags: 0, "cudaHostUnregister": lambda self, address: 0,
    })()  # fmt: skip
    for name, value in {
        "Stream": Stream, "Event": Event, "current_stream": current_stream, "stream": stream, "StreamContext": stream,
        "default_stream": lambda device=None: default,
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: devices,
        "current_device": lambda: 0, "set_device": lambda device: None, "init": lambda: None,
        "_lazy_init": lambda: None, "synchronize": lambda device=None: log("synchronize device"),
        "memory_stats": lambda device=None: {}, "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0, "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0, "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (memory, memory), "empty_cache": lambda: None,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability, "is_bf16_supported": lambda *a, **k: True,
        "get_rng_state": lambda device=None: cpu_state, "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None, "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: False, "cudart": lambda: runtime,
        "device": lambda device: contextlib.nullcontext(),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: log("record_stream")
    tensor.pin_memory = lambda self, *a, **k: self
    tensor.is_pinned = lambda self, *a, **k: True
