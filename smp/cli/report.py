"""Write a page about a run: one HTML file with its curves, time, memory, checkpoints, settings, resumes and events.

It is read from the files of the run directory, also of a running job, and opens in any browser without a network.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path

from smp.checkpoint.outputs import refuse_replacing
from smp.cli.output import shown
from smp.errors import UserError
from smp.report.page import render
from smp.report.run_files import read_run
from smp.units import readable

# In the beginning of each page, also of earlier versions.
_MARK = b"""content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", metavar="RUN", help="the run directory, --output_dir of the job")
    parser.add_argument("--output", metavar="FILE", help="the page to write (report.html in the run directory)")


def run(options: argparse.Namespace) -> int:
    """Write the page of ``options.directory``."""
    directory = Path(options.directory).expanduser().absolute()
    output = Path(options.output).expanduser().absolute() if options.output else directory / "report.html"
    if output.is_dir():
        raise UserError(f"--output {options.output} is a directory: give the name of a file")
    refuse_replacing(output, "--output", _MARK)
    page = render(read_run(directory), now=datetime.datetime.now(datetime.UTC)).encode()
    # Renamed when complete: a browser may be looking at an earlier one.
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(page)
        temporary.replace(output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {output} ({error.strerror}): give another file with --output") from None
    print(f"{shown(output)}: {readable(len(page))}")
    return 0
