"""Run a sweep: compute the cells that a store does not hold yet, and commit each as soon as it is done.

The engines compute cells: processes on this machine, or a Dask cluster. Both give the same results.
"""

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from depthgauge._version import __version__
from depthgauge.base.errors import (
    DepthgaugeError,
    InputError,
    InterruptedRunError,
    missing_extra,
    require_count,
    unknown_name,
)
from depthgauge.base.format import counted
from depthgauge.base.progress import Step, silent
from depthgauge.sweeps.grid import Cell, CellOutcome, Grid
from depthgauge.sweeps.store import RunSummary, Store, run_lock
from depthgauge.theory.linalg.small_matrices import threads_for

ENGINES = ("local", "dask")
CONNECT_SECONDS = 4
"""Seconds to wait for the scheduler, and again for its first worker."""
IN_FLIGHT = 1000
"""Number of cells submitted to a cluster at once; large enough that workers that join later have work."""

_ONE_CELL = threading.Lock()


class EngineError(DepthgaugeError):
    """An engine failed during a sweep; committed rows are kept."""


@runtime_checkable
class Engine(Protocol):
    """Computes cells, in any order."""

    def check(self) -> None:
        """Raise InputError if the engine is not usable; called before anything is written."""

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        """Yield the outcome of each cell as soon as it is done; closing the iterator stops the work."""


def compute(cell: Cell) -> CellOutcome:
    """Compute one cell on one thread, and return its result or its error."""
    assert cell.run is not None, "a cell that was read from a store is not computed"
    # The precision of arb numbers is global to the process, so a process computes one cell at a time.
    # On one thread, sums are reproducible and worker processes do not compete for cores.
    with _ONE_CELL, threads_for(1):
        begun = time.perf_counter()
        try:
            result, error = cell.run(cell), None
        except Exception as stopped:
            kind = "" if isinstance(stopped, DepthgaugeError) else f"{type(stopped).__name__}: "
            result, error = None, kind + " ".join(str(stopped).split())
        return CellOutcome(cell.identity, result, error, time.perf_counter() - begun)


def _initialise_worker(parent: int) -> None:
    """Initialise a worker process: ignore Ctrl-C, which the parent handles, and exit when the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@dataclass(frozen=True)
class Local:
    """Computes cells in `jobs` processes on this machine, by default one per core; one job runs in this process."""

    jobs: int | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None:
            require_count("jobs", self.jobs, "the number of worker processes")

    def check(self) -> None:
        """Do nothing: the local engine is always usable."""

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        """Yield the outcome of each cell as soon as it is done."""
        import joblib

        jobs = min(self.jobs or joblib.cpu_count(), len(cells))
        if jobs <= 1:
            yield from map(compute, cells)
            return
        from joblib.externals.loky.process_executor import BrokenProcessPool

        workers: Any = {"initializer": _initialise_worker, "initargs": (os.getpid(),)}
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1, **workers):
            parallel = _parallel(jobs, pre_dispatch="4*n_jobs")
        try:
            with _suppress_errors_after_abort(parallel):
                yield from _unordered(parallel, cells)
        except BrokenProcessPool as error:
            raise EngineError(
                "a worker process died, possibly because memory ran out; fewer jobs need less memory"
            ) from error


@contextmanager
def _suppress_errors_after_abort(parallel: Any) -> Iterator[None]:
    """Suppress errors from pool threads after an abort."""
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
    """Computes cells on the workers of a running Dask scheduler (`dask scheduler`, `dask worker ADDRESS`)."""

    address: str

    def check(self) -> None:
        """Connect once, and check that every worker has this version of depthgauge."""
        with connected(self.address):
            pass

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        """Yield the outcome of each cell as soon as it is done."""
        import joblib

        with connected(self.address) as client:
            with joblib.parallel_config(backend=_reporting_backend(client)):
                parallel = _parallel(-1, pre_dispatch=IN_FLIGHT)
            yield from _unordered(parallel, cells)


def _parallel(jobs: int, pre_dispatch: int | str) -> Any:
    import joblib

    return joblib.Parallel(jobs, return_as="generator_unordered", batch_size=1, pre_dispatch=pre_dispatch)


def _unordered(parallel: Any, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
    """Yield outcomes as joblib finishes them; closing the generator early cancels the remaining cells."""
    import joblib

    with _quiet_resource_tracker():
        done = parallel(joblib.delayed(compute)(cell) for cell in cells)
    try:
        for outcome in done:  # noqa: UP028 - `yield from` would close `done` before the warnings are disabled
            yield outcome
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # joblib warns about generators that are closed early
            done.close()


@contextmanager
def _quiet_resource_tracker() -> Iterator[None]:
    """Make the resource tracker process, if it starts now, ignore warnings about an aborted pool."""
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
    """Yield a client of the scheduler at `address`, after checking that it has workers with this version."""
    try:
        from distributed import Client
    except ImportError as error:
        raise missing_extra("the engine dask", "cluster") from error
    log = logging.getLogger("distributed")
    with ExitStack() as restored:
        restored.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)  # a lost worker is not an error, its cells are computed again
        _check_scheduler(address)
        client: Any = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)  # type: ignore[no-untyped-call]
        with client:
            try:
                client.wait_for_workers(1, timeout=CONNECT_SECONDS)
            except TimeoutError as error:
                raise InputError(
                    f"the Dask scheduler at {address} has no workers; start some with `dask worker {address}`"
                ) from error
            for worker, found in client.run(_installed, on_error="return").items():
                if found != __version__:
                    raise InputError(
                        f"the worker {worker} has depthgauge {found}, this machine has {__version__}; "
                        "install the same depthgauge on every machine"
                    )
            yield client


def _check_scheduler(address: str) -> None:
    """Connect and disconnect once; a Client whose connection fails would keep retrying in the background."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from distributed.comm.core import connect

    async def connect_once() -> None:
        reach: Any = connect
        comm = await asyncio.wait_for(reach(address, timeout=CONNECT_SECONDS), CONNECT_SECONDS)
        await comm.close()

    with ThreadPoolExecutor(1) as thread:  # the caller may already run an event loop
        try:
            thread.submit(asyncio.run, connect_once()).result()
        except Exception as error:  # a different service at this address may raise anything
            raise InputError(
                f"no Dask scheduler answers at {address!r}; start one with `dask scheduler` and give its address, "
                "for example tcp://127.0.0.1:8786"
            ) from error


def _installed() -> str:
    return __version__


def _reporting_backend(client: Any) -> Any:
    """Return joblib's Dask backend, extended to raise for a cell that the cluster abandoned instead of waiting."""
    from joblib._dask import DaskDistributedBackend

    class ReportingBackend(DaskDistributedBackend):  # type: ignore[misc]
        def effective_n_jobs(self, n_jobs: int) -> int:
            return max(2, int(super().effective_n_jobs(n_jobs)))  # with 1, joblib would not use the cluster

        def submit(self, func: Any, callback: Any = None) -> Any:
            future = super().submit(func, callback)

            def report_failure(done: Any) -> None:
                if callback is not None and done.exception() is not None:
                    callback(done)

            future.add_done_callback(report_failure)
            return future

        def retrieve_result_callback(self, out: Any) -> Any:
            if hasattr(out, "exception"):
                reason = " ".join(str(out.exception()).split()).split(". ")[0]
                raise EngineError(f"the cluster abandoned a cell: {reason}")
            return super().retrieve_result_callback(out)

    return ReportingBackend(client=client)


def choose_engine(name: str, scheduler: str | None = None, jobs: int | None = None) -> Engine:
    """Return the engine for the options of a user; raise InputError for options that do not fit together."""
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if name == "local":
        if scheduler is not None:
            given = f"got {scheduler!r} with the engine local"
            raise InputError(f"--scheduler applies to the engine dask only, {given}; add --engine dask")
        return Local(jobs)
    if scheduler is None:
        raise InputError("the engine dask needs --scheduler ADDRESS, for example tcp://127.0.0.1:8786")
    if jobs is not None:
        raise InputError(
            f"--jobs applies to the engine local only, got {jobs}; "
            "a cluster computes one cell at a time on each of its workers"
        )
    return Dask(scheduler)


def run_grid(
    grid: Grid, store: str | Path, *, engine: Engine | None = None, retry_failed: bool = False, progress: Step = silent
) -> RunSummary:
    """Compute the cells of a grid that its store does not hold yet."""
    return run_cells(
        grid.name, grid.document(), grid.cells(), store, engine=engine, retry_failed=retry_failed, progress=progress
    )


def run_cells(
    name: str,
    document: dict[str, Any],
    cells: Sequence[Cell],
    store: str | Path,
    *,
    engine: Engine | None = None,
    retry_failed: bool = False,
    progress: Step = silent,
) -> RunSummary:
    """Compute the cells that the store does not hold yet, and commit each as soon as it is done.

    `name` and `document` describe the grid that the cells belong to; the store keeps both.
    """
    path, begun, engine = Path(store), time.perf_counter(), engine or Local()
    engine.check()
    with run_lock(path), Store.open(path, create=True) as opened:
        grid = opened.plan(name, document, cells)
        settled = opened.settled((cell.identity for cell in cells), failed=not retry_failed)
        missing = [cell for cell in cells if cell.identity not in settled]
        computed = 0
        try:
            computed = _compute(opened, missing, engine, progress)
        except KeyboardInterrupt as error:
            raise InterruptedRunError(f"interrupted: {_kept(opened, grid, cells)}") from error
        except EngineError as error:
            raise EngineError(f"{error}; {_kept(opened, grid, cells)}") from error
        return RunSummary(computed, opened.count(grid), time.perf_counter() - begun)


def _kept(store: Store, grid: str, cells: Sequence[Cell]) -> str:
    done = store.count(grid).done
    return (
        f"{done} of {counted(len(cells), 'cell')} done and kept in {store.path}; run the same command again to resume"
    )


def _compute(store: Store, missing: Sequence[Cell], engine: Engine, progress: Step) -> int:
    progress(0, len(missing), "")
    begun, done = time.perf_counter(), 0
    if missing:
        with closing(engine.outcomes(missing)) as outcomes:  # type: ignore[type-var]
            for outcome in outcomes:
                store.record(outcome)
                done += 1
                progress(done, len(missing), f"{done / (time.perf_counter() - begun):.3g} cells/s")
    return done
