"""Where cells are computed: in processes of this machine, or on a Dask cluster; the numbers are the same."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from depthgauge._version import __version__
from depthgauge.errors import DepthgaugeError, InputError, require_count, unknown_name
from depthgauge.sweeps.cells import Cell, Outcome
from depthgauge.sweeps.tasks import TASKS

ENGINES = ("local", "dask")
CONNECT_SECONDS = 4
"""How long to wait for a scheduler, and then for its first worker."""
IN_FLIGHT = 1000
"""Cells handed to a cluster at once, so that workers that join later find work."""

_ONE_AT_A_TIME = threading.Lock()


class EngineError(DepthgaugeError):
    """The machinery under a sweep failed; what was committed is kept."""


@runtime_checkable
class Engine(Protocol):
    """Computes cells in any order."""

    def check(self) -> None:
        """Raise where it cannot work at all, before anything is written."""

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """The outcome of every cell, as each is done; closing it early stops the work."""


def compute(run: Callable[[Cell], dict[str, Any]], cell: Cell) -> Outcome:
    """Run one cell on one thread: its result, or the error that stopped it."""
    own = TASKS.get(cell.task)
    if own is not None and own.version != cell.version:
        raise EngineError(
            f"a worker has version {own.version} of the task {cell.task}, this machine {cell.version}; "
            "install the same depthgauge on every machine"
        )
    # One cell at a time in a process: the precision of ball arithmetic is one setting for all threads.
    with _ONE_AT_A_TIME, one_thread():
        begun = time.perf_counter()
        try:
            result, error = run(cell), None
        except Exception as stopped:
            result, error = None, _sentence(stopped)
        return Outcome(cell.identity, result, error, time.perf_counter() - begun)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, DepthgaugeError) else f"{type(error).__name__}: {text}"


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: sums come out the same everywhere, and processes do not fight for cores."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _settle_in(parent: int) -> None:
    """Once in every worker process: leave Ctrl-C to the parent, and end when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@dataclass(frozen=True)
class Local:
    """Processes on this machine, one for each core unless `jobs` says otherwise; with one job, this very process."""

    jobs: int | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None:
            require_count("jobs", self.jobs, "the number of processes")

    def check(self) -> None:
        """There is always this machine."""

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """As `Engine` says."""
        import joblib

        jobs = min(self.jobs or joblib.cpu_count(), len(cells))
        if jobs <= 1:
            yield from (compute(TASKS[cell.task].run, cell) for cell in cells)
            return
        from joblib.externals.loky.process_executor import BrokenProcessPool

        workers: Any = {"initializer": _settle_in, "initargs": (os.getpid(),)}
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1, **workers):
            parallel = _parallel(jobs, pre_dispatch="4*n_jobs")
        try:
            with _silence_after_stopping(parallel):
                yield from _unordered(parallel, cells)
        except BrokenProcessPool as error:
            raise EngineError("a worker process died, perhaps for lack of memory: fewer --jobs need less") from error


@contextmanager
def _silence_after_stopping(parallel: Any) -> Iterator[None]:
    """Leave unsaid what a pool's own thread complains of once its work was cut off under its feet."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not getattr(parallel, "_aborting", False):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


@dataclass(frozen=True)
class Dask:
    """The workers of a running Dask scheduler, `dask scheduler` and any number of `dask worker ADDRESS`."""

    address: str

    def check(self) -> None:
        """Connect once."""
        with connected(self.address):
            pass

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """As `Engine` says."""
        import joblib

        with connected(self.address) as client:
            with joblib.parallel_config(backend=_reporting_backend(client)):
                parallel = _parallel(-1, pre_dispatch=IN_FLIGHT)
            yield from _unordered(parallel, cells)


def _parallel(jobs: int, pre_dispatch: int | str) -> Any:
    import joblib

    return joblib.Parallel(jobs, return_as="generator_unordered", batch_size=1, pre_dispatch=pre_dispatch)


def _unordered(parallel: Any, cells: Sequence[Cell]) -> Iterator[Outcome]:
    """joblib over the cells, each handed back as soon as it is done; stopping early cancels the rest."""
    import joblib

    with _quiet_tracker():
        done = parallel(joblib.delayed(compute)(TASKS[cell.task].run, cell) for cell in cells)
    try:
        for outcome in done:  # noqa: UP028 - `yield from` would hand an early end on before warnings are off
            yield outcome
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # joblib warns of generators that are left early, which is meant here
            done.close()


@contextmanager
def _quiet_tracker() -> Iterator[None]:
    """Let the process that tidies up after a pool, if it starts now, do so without words when the pool was cut off."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join([*([before] if before else []), "ignore:resource_tracker:UserWarning"])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """A client of the scheduler at an address, with at least one worker that runs this version."""
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError("the engine dask needs the extra cluster; pip install 'depthgauge[cluster]'") from error
    with _quiet("distributed"):
        _probe(address)
        client: Any = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)  # type: ignore[no-untyped-call]
        with client:
            try:
                client.wait_for_workers(1, timeout=CONNECT_SECONDS)
            except TimeoutError as error:
                raise InputError(
                    f"the Dask scheduler at {address} has no workers; start some with `dask worker {address}`"
                ) from error
            _check_workers(client)
            yield client


def _probe(address: str) -> None:
    """Shake hands once; a client that fails to do so would go on trying in the background."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from distributed.comm.core import connect

    async def shake_hands() -> None:
        reach: Any = connect
        comm = await asyncio.wait_for(reach(address, timeout=CONNECT_SECONDS), CONNECT_SECONDS)
        await comm.close()

    with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop of its own
        try:
            thread.submit(asyncio.run, shake_hands()).result()
        except Exception as error:  # whatever listens there may answer anything
            raise InputError(
                f"no Dask scheduler answers at {address!r}; start one with `dask scheduler` and give its address, "
                "such as tcp://127.0.0.1:8786"
            ) from error


def _check_workers(client: Any) -> None:
    """Every worker must have this version of depthgauge."""
    for worker, found in client.run(_installed, on_error="return").items():
        if found != __version__:
            raise InputError(
                f"the worker {worker} has depthgauge {found}, this machine has {__version__}; "
                "install the same depthgauge on every machine"
            )


def _installed() -> str:
    return __version__


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Leave warnings of a library unsaid: a lost worker is not an error, and its cells are computed again."""
    import logging

    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _reporting_backend(client: Any) -> Any:
    """joblib's Dask backend, which also hands on a cell that the cluster gave up, instead of waiting for it forever."""
    from joblib._dask import DaskDistributedBackend

    class ReportingBackend(DaskDistributedBackend):  # type: ignore[misc]
        def effective_n_jobs(self, n_jobs: int) -> int:
            return max(2, int(super().effective_n_jobs(n_jobs)))  # of one, joblib would do without the cluster

        def submit(self, func: Any, callback: Any = None) -> Any:
            future = super().submit(func, callback)

            def hand_on(done: Any) -> None:
                if callback is not None and done.exception() is not None:
                    callback(done)

            future.add_done_callback(hand_on)
            return future

        def retrieve_result_callback(self, out: Any) -> Any:
            if hasattr(out, "exception"):
                reason = " ".join(str(out.exception()).split()).split(". ")[0]
                raise EngineError(f"the cluster gave up a cell: {reason}")
            return super().retrieve_result_callback(out)

    return ReportingBackend(client=client)


def choose_engine(name: str, scheduler: str | None = None, jobs: int | None = None) -> Engine:
    """The engine a user asked for."""
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if name == "local":
        if scheduler is not None:
            raise InputError(f"a scheduler is of use to the engine dask only, got {scheduler!r}; add --engine dask")
        return Local(jobs)
    if scheduler is None:
        raise InputError("the engine dask needs --scheduler ADDRESS, such as tcp://127.0.0.1:8786")
    if jobs is not None:
        raise InputError("--jobs is for the engine local; a cluster has as many processes as it has workers")
    return Dask(scheduler)
