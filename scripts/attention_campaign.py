"""Run the campaigns of fast attention on a GPU: attacked calls, then random calls under compute-sanitizer.

    python scripts/attention_campaign.py --memcheck 2000 --attacked 20000

Each campaign is cut into pieces. A piece is a process of its own (tests/support/attacked_calls.py) with its own seed,
so that a crash names the seed. Several pieces run at the same time, because most of the time is spent in the compiler
of the kernels, whose results all pieces share. The last lines are the summaries of the two campaigns. The exit status
is 1 if a piece fails, or if compute-sanitizer is missing and --if-present is not given.
"""

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIECE = ROOT / "tests" / "support" / "attacked_calls.py"
SANITIZER = "compute-sanitizer"
# Errors of API calls are not counted: libraries probe the driver for symbols that it may lack. A failed launch raises
# an error in the process anyway. Illegal accesses of kernels are always counted.
OPTIONS = ("--tool", "memcheck", "--error-exitcode", "1", "--report-api-errors", "no", "--launch-timeout", "0")
ATTACKED = "--attacked", "--per-kind", "100", "--long", "16000"
MEMCHECK = "--per-kind", "20", "--largest", "1100"
ATTACKED_SIZE, MEMCHECK_SIZE = 1400, 140
"""Calls of one piece, of 14 and of 7 kinds."""
TAIL = 60
"""The lines of a failed piece that are printed."""


@dataclass(frozen=True)
class Job:
    """One piece: its seed, its number of calls, and whether it runs under the sanitizer.

    If `is_uncached`, every tensor has an allocation of its own: in torch's pool, an access beyond a tensor is an access
    to another tensor, which nothing reports.
    """

    seed: int
    calls: int
    arguments: tuple[str, ...]
    is_checked: bool = False
    is_uncached: bool = False


@dataclass(frozen=True)
class Done:
    """The result of a piece: its exit status, its output, and the call that was under way when it ended."""

    job: Job
    status: int
    output: str
    last_call: str

    @property
    def summary(self) -> str:
        """The summary that a successful piece prints, or an empty text."""
        lines = [line for line in self.output.splitlines() if line.startswith("attention campaign: seed")]
        return lines[-1] if lines else ""

    @property
    def is_fine(self) -> bool:
        """Whether the piece made all its calls and the sanitizer found nothing."""
        found = re.search(r"ERROR SUMMARY: (\d+) error", self.output)
        is_clean = found is not None and int(found.group(1)) == 0 if self.job.is_checked else found is None
        return self.status == 0 and f"{self.job.calls} calls" in self.summary and is_clean


def find_sanitizer(given: str | None = None) -> str | None:
    """Return the path of compute-sanitizer: the given one, on PATH, under $CUDA_HOME, or under /usr/local/cuda*."""
    if given is not None:
        return shutil.which(given)
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [Path(home) for home in homes] + sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    places = [place for folder in folders for place in (folder / "bin", folder / "compute-sanitizer")]
    return shutil.which(SANITIZER) or shutil.which(SANITIZER, path=os.pathsep.join(map(str, places)))


def pieces(calls: int, size: int, first_seed: int, arguments: Sequence[str]) -> list[Job]:
    """Cut a campaign into pieces of at most `size` calls. Unforced calls of every second piece prefer polynomials."""
    jobs = []
    for at in range(math.ceil(calls / size)):
        own = (*arguments, "--cheap") if at % 2 else tuple(arguments)
        jobs.append(Job(first_seed + at, min(size, calls - at * size), own))
    return jobs


def run(job: Job, sanitizer: str | None, device: str, limit: float) -> Done:
    """Run a piece in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    if job.is_uncached:
        environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "call.txt"
        command = [sys.executable, str(PIECE), "--seed", str(job.seed), "--calls", str(job.calls), "--device", device]
        command += [*job.arguments, "--trace", str(trace)]
        if job.is_checked and sanitizer is not None:
            command = [sanitizer, *OPTIONS, *command]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit,
                check=False,
            )  # fmt: skip
            status, output = done.returncode, done.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired as error:
            status, output = 124, (error.stdout or b"").decode(errors="replace") + f"\nstopped after {limit:.0f} s"
        last = trace.read_text(encoding="utf-8").strip() if trace.exists() else "no call was started"
    return Done(job, status, output, last)


def say(*lines: str) -> None:
    """Print lines at once."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def campaign(name: str, jobs: Sequence[Job], sanitizer: str | None, options: argparse.Namespace) -> tuple[str, bool]:
    """Run all pieces of a campaign. Return its summary and whether all pieces passed."""
    started, totals, failed = time.monotonic(), Counter[str](), []
    with ThreadPoolExecutor(options.workers) as pool:
        pending = [pool.submit(run, job, sanitizer, options.device, options.limit) for job in jobs]
        for done in (future.result() for future in as_completed(pending)):
            if done.is_fine:
                say(done.summary)
                for number, what in re.findall(
                    r"(\d+) (calls|kinds|polynomial|mixed|refused|with gradients)", done.summary
                ):
                    totals[what] += int(number)
                continue
            failed.append(done.job.seed)
            say(
                f"{name}: the piece with seed {done.job.seed} failed with exit status {done.status}; its last call was",
                done.last_call, *done.output.splitlines()[-TAIL:],
            )  # fmt: skip
    seconds = time.monotonic() - started
    verdict = f"FAILED, seeds {', '.join(map(str, sorted(failed)))}" if failed else "no violation"
    return (
        f"{name}: {totals['calls']} calls of {totals['kinds']} kinds in {len(jobs)} processes "
        f"({totals['polynomial']} polynomial, {totals['mixed']} mixed, {totals['refused']} refused, "
        f"{totals['with gradients']} with gradients), {verdict}; {seconds:.0f} s"
    ), not failed


def main(arguments: list[str] | None = None) -> int:
    """Run both campaigns and print their summaries. Return 1 if one of them fails or cannot run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memcheck", type=int, default=2000, help="random calls under compute-sanitizer")
    parser.add_argument("--attacked", type=int, default=20000, help="attacked calls without it")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first piece")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, min(10, (os.cpu_count() or 2) * 3 // 4)))
    parser.add_argument("--limit", type=float, default=540, help="seconds after which a piece is stopped")
    parser.add_argument("--sanitizer", help="the path of compute-sanitizer, if it is not in a usual place")
    parser.add_argument("--if-present", action="store_true", help="accept that compute-sanitizer is missing")
    options = parser.parse_args(arguments)
    summaries, is_fine = [], True
    if options.attacked:
        jobs = pieces(options.attacked, ATTACKED_SIZE, options.seed, ATTACKED)
        summary, passed = campaign("attacked calls", jobs, None, options)
        summaries.append(summary)
        is_fine &= passed
    if options.memcheck:
        sanitizer = find_sanitizer(options.sanitizer)
        jobs = [
            replace(job, is_checked=sanitizer is not None, is_uncached=True)
            for job in pieces(options.memcheck, MEMCHECK_SIZE, options.seed, MEMCHECK)
        ]
        name = "memcheck"
        if sanitizer is None:
            name = "WITHOUT compute-sanitizer"
            say(
                f"{SANITIZER} was not found on PATH, under $CUDA_HOME or under /usr/local/cuda*: memcheck was NOT run. "
                "The same calls are made without it. Give its path with --sanitizer."
            )
            is_fine &= options.if_present
        else:
            # Compiling kernels and comparing with float64 are slow under the sanitizer, so both are done before.
            plain = [replace(job, is_checked=False) for job in jobs]
            summary, passed = campaign("the calls of memcheck, first without it", plain, None, options)
            say(summary)
            is_fine &= passed
            jobs = [replace(job, arguments=(*job.arguments, "--not-compared")) for job in jobs]
        summary, passed = campaign(name, jobs, sanitizer, options)
        summaries.append(summary)
        is_fine &= passed
    say(*summaries)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
