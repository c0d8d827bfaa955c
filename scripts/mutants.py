"""Plant errors in the source, one at a time, and run the tests that must fail: `make mutants`.

`python scripts/mutants.py` plants all errors of `ERRORS`, and `python scripts/mutants.py WORD …` those whose name or
file contains one of the words. The tests run first without an error, and must pass. An error that no test notices is
named, and the exit code is 1; the answer is a better test.

The errors are planted in a copy of the project. Each replaces a text that occurs exactly once in its file: after a
change of the source, an error that cannot be planted any more must be replaced by another one.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from check_readme import copy_project

ROOT = Path(__file__).parents[1]
SOURCE = Path("src") / "depthgauge"
LIMIT = 900
"""Seconds after which tests are stopped. An error that makes them run longer is noticed."""
NOT_IN_MAKE_TEST = "not soak and not models and not gpu and not docs and not kernels and not families"
_ALREADY_IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"


class PlantedError(NamedTuple):
    """One error: what is wrong, the file in src/depthgauge, the text and what replaces it, and the tests that fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


ERRORS = (
    # --- theory
    PlantedError(
        "the distance of distributions is twice as large", "theory/linalg/norms.py",
        "(p - q).abs().sum(dim=-1) / 2", "(p - q).abs().sum(dim=-1)", "tests/theory/linalg/test_softmax.py",
    ),
    PlantedError(
        "a bound times 0.99", "theory/linalg/norms.py",
        "return torch.tanh(theta / 2) * v_col", "return 0.99 * torch.tanh(theta / 2) * v_col",
        "tests/theory/linalg/test_softmax.py",
    ),
    PlantedError(
        "a difference is rounded down instead of up", "theory/linalg/rounding.py",
        "return up(_operand(a) - _operand(b))", "return down(_operand(a) - _operand(b))",
        "tests/theory/linalg/test_rounding.py",
    ),
    PlantedError(
        "a matrix product is not rounded up", "theory/linalg/rounding.py",
        "add_up(div_up(_lifted(A) @ _lifted(B), _shrink(k)), k * TINY)", "_lifted(A) @ _lifted(B)",
        "tests/theory/linalg/test_rounding.py",
    ),
    PlantedError(
        "the exponential of a large number is finite", "theory/linalg/rounding.py",
        "value = torch.where(x > _EXP_MOST, _INF, value)", "pass", "tests/theory/linalg/test_rounding.py",
    ),
    PlantedError(
        "a causal token does not see itself", "theory/network/network.py",
        "visible = columns <= columns[start:stop, None]", "visible = columns < columns[start:stop, None]",
        "tests/theory/network/test_network.py",
    ),
    PlantedError(
        "RMSNorm without its bias", "theory/network/network.py",
        "gain, NORM_EPSILON) + bias", "gain, NORM_EPSILON)", "tests/theory/network/test_network.py",
    ),
    PlantedError(
        "the product of layers has the wrong sign", "theory/surrogates/closed_forms.py",
        "Z = Z + V + Z @ V if", "Z = Z + V - Z @ V if", "tests/theory/surrogates/test_surrogates.py",
    ),
    PlantedError(
        "the products of m layers in the wrong order", "theory/surrogates/closed_forms.py",
        "for m in range(len(network), 0, -1):", "for m in range(1, len(network) + 1):",
        "tests/theory/certificates/test_causal.py",
    ),
    PlantedError(
        "the bias of a norm does not reach the queries", "theory/surrogates/closed_forms.py",
        "bias[0] @ query + query_bias, bias[0] @ value.sum(0)", "query_bias, bias[0] @ value.sum(0)",
        "tests/theory/surrogates/test_surrogates.py",
    ),
    PlantedError(
        "an error above the tolerance is accepted", "theory/depth/effective.py",
        "if reached <= tolerance:", "if reached <= 1.5 * tolerance:", "tests/theory/depth/test_depth.py",
    ),
    PlantedError(
        "one refuted choice refutes all", "theory/depth/effective.py",
        '"refuted" if refuted == tried else', '"refuted" if refuted else', "tests/theory/depth/test_depth.py",
    ),
    PlantedError(
        "the mean over rows is divided by n − 1", "theory/measures/quantities.py",
        "tv_mean=tv_sum.sum(dim=0) / n,", "tv_mean=tv_sum.sum(dim=0) / (n - 1),",
        "tests/theory/measures/test_measures.py",
    ),
    PlantedError(
        "the contraction is twice as large", "theory/measures/quantities.py",
        "contraction=widest / 2 / max_norm", "contraction=widest / max_norm", "tests/theory/measures/test_measures.py",
    ),
    # --- confidence
    PlantedError(
        "a one-sided quantile for an interval", "checkpoints/tasks/confidence.py",
        "special.stdtrit(n - 1, (1 + LEVEL) / 2)", "special.stdtrit(n - 1, LEVEL)",
        "tests/checkpoints/test_mean_interval.py",
    ),
    PlantedError(
        "the wrong end of the interval of gains", "checkpoints/tasks/confidence.py",
        "q = np.minimum(last, 1 - p)", "q = np.minimum(first, 1 - p)", "tests/checkpoints/test_paired_accuracy.py",
    ),
    PlantedError(
        "McNemar's test looks at lost items alone", "checkpoints/tasks/confidence.py",
        "stats.binom.cdf(min(lost, gained), changed, 0.5)", "stats.binom.cdf(lost, changed, 0.5)",
        "tests/checkpoints/test_paired_accuracy.py",
    ),
    PlantedError(
        "no correction for several models", "surgery/certify.py",
        "tail = _tail(share, confidence) / looks", "tail = _tail(share, confidence)", "tests/surgery/test_guarantee.py",
    ),
    PlantedError(
        "the order statistic below", "surgery/certify.py",
        "float(x[np.argmax(enough)])", "float(x[max(0, np.argmax(enough) - 1)])", "tests/surgery/test_guarantee.py",
    ),
    PlantedError(
        "the guarantee counts windows of other kinds", "surgery/certify.py",
        "increases = (losses - self.losses)[self._guaranteed].tolist()", "increases = (losses - self.losses).tolist()",
        "tests/workflows/test_shrink.py",
    ),
    # --- windows
    PlantedError(
        "the BOS token replaces the first token", "checkpoints/inputs/windows.py",
        "ids[:, : n - 1], ids[:, n:]", "ids[:, 1:n], ids[:, n:]", "tests/workflows/test_texts.py",
    ),
    PlantedError(
        "a window of special tokens alone", "checkpoints/inputs/windows.py",
        "if window <= around:", "if window < around:",
        "tests/surgery/test_calibration.py tests/checkpoints/test_load.py",
    ),
    PlantedError(
        "padding of targets is counted", "checkpoints/inputs/windows.py",
        "_padded(targets, IGNORED)", "_padded(targets, pad)", "tests/workflows/test_pairs.py -k one_by_one or gauge",
    ),
    PlantedError(
        "repeated windows stay", "checkpoints/inputs/windows.py",
        "            seen.add(content)\n", "", "tests/surgery/test_calibration.py",
    ),
    # --- what-ifs
    PlantedError(
        "a parallel block is subtracted", "checkpoints/blocks/what_if.py",
        "after[now] += (states[()] - dense.at(layer - 1)[windows])",
        "after[now] -= (states[()] - dense.at(layer - 1)[windows])",
        "tests/checkpoints/test_what_if.py -k whole_passes and parallel",
    ),
    PlantedError(
        "the weights of an expert are not put back", "checkpoints/blocks/what_if.py",
        "            part.copy_(value)\n", "            pass\n", "tests/checkpoints/test_experts.py",
    ),
    PlantedError(
        "the block influence is a similarity", "monitor/measurement.py",
        '"block_influence": 1 - token_mean(cosines, real)', '"block_influence": token_mean(cosines, real)',
        "tests/monitor/test_model_probe.py",
    ),
    PlantedError(
        "score ranges of processes are averaged", "monitor/measurement.py",
        "stack.amax(dim=0) if name in LARGEST else stack.mean(dim=0)", "stack.mean(dim=0)",
        "tests/monitor/test_distributed.py -k maximum",
    ),
    PlantedError(
        "an update relative to the state after it", "monitor/measurement.py",
        "dim=-1) / sizes[:-1], real)", "dim=-1) / sizes[1:], real)", "tests/monitor/test_model_probe.py",
    ),
    # --- surgery
    PlantedError(
        "a dropped repair", "surgery/repair.py",
        "ridge, inputs):\n            parameter.copy_(parameter.double() + delta.to(parameter.device))",
        "ridge, inputs):\n            parameter.copy_(parameter.double())", "tests/surgery/test_repair.py",
    ),
    PlantedError(
        "a repair without the multiplier of the family", "surgery/repair.py",
        "features = multiplier * torch.cat", "features = torch.cat", "tests/surgery/test_repair.py",
    ),
    PlantedError(
        "one layer too many with another kind of attention", "surgery/extract.py",
        "sum(layer < value for layer in kept)", "sum(layer <= value for layer in kept)",
        "tests/surgery/test_extract.py -k window_rule or lists",
    ),
    PlantedError(
        "the worse set of blocks is chosen", "surgery/candidates.py",
        "_is_better(removed, best, finished)", "_is_better(best, removed, finished)",
        "tests/surgery/test_candidates.py -k smallest_loss",
    ),
    PlantedError(
        "a tensor that differs from the one in memory", "surgery/verify.py",
        "or (mine != other and not offloaded)", "", "tests/surgery/test_reload.py -k every_difference",
    ),
    # --- recovery
    PlantedError(
        "a training that does not help stays", "recovery/recover_model.py",
        "if not gain > error:", "if False:", "tests/surgery/test_candidates.py -k does_not_help",
    ),
    PlantedError(
        "the divergence the other way around", "recovery/divergence.py",
        "for one in (made, target))", "for one in (target, made))", "tests/recovery/test_distillation.py -k plain",
    ),
    # --- files and stores
    PlantedError(
        "a finished row is replaced", "sweeps/store.py",
        '"error = excluded.error, seconds = excluded.seconds WHERE rows.error IS NOT NULL"',
        '"error = excluded.error, seconds = excluded.seconds"', "tests/sweeps/test_store.py",
    ),
    PlantedError(
        "a run with other options is continued", "base/journal.py",
        "(before := self._before.get(name)) != value:", "(before := self._before.get(name)) is None:",
        "tests/test_journal.py",
    ),
    PlantedError(
        "a file that appeared meanwhile is replaced", "base/io.py",
        "        if replace:\n", "        if True:\n", "tests/test_journal.py",
    ),
    PlantedError(
        "probabilities of the wrong binomial", "papers/separation/probability.py",
        "probability * (r - p) / (p + 1)", "probability * (r - p) / (p + 2)", "tests/papers/separation/test_exact.py",
    ),
)  # fmt: skip


def chosen(words: Sequence[str]) -> list[PlantedError]:
    """Return the errors that contain one of the words, or all; exit if one of them cannot be planted."""
    some = [one for one in ERRORS if not words or any(word in f"{one.what} {one.file}" for word in words)]
    stale = [
        f"{one.file} has {count} times, instead of once: {one.old}"
        for one in ERRORS
        if (count := (ROOT / SOURCE / one.file).read_text(encoding="utf-8").count(one.old)) != 1
    ]
    if stale or not some:
        sys.exit("\n".join(stale) or f"no error contains {' or '.join(words)}")
    return some


def run_tests(folder: Path, tests: str, log: Path) -> int:
    """Run tests of a copy of the project in a forked process, and return pytest's exit code; −14 if they take too long.

    The fork has imported torch and transformers already, but not depthgauge.
    """
    import pytest

    child = os.fork()
    if child == 0:
        os.setsid()
        signal.alarm(LIMIT)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder / "src")
        sys.path.insert(0, str(folder / "src"))
        with open(log, "wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        paths, _, selected = tests.partition(" -k ")
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", NOT_IN_MAKE_TEST, "-W", _ALREADY_IMPORTED]
        try:
            code = int(pytest.main([*options, *(["-k", selected] if selected else []), *paths.split()]))
        except BaseException:
            traceback.print_exc()
            code = 3
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return code


def survivors(errors: Iterable[PlantedError], folder: Path) -> list[PlantedError]:
    """Plant each error in a copy of the project, and return those that no test notices; print what happens."""
    copy, log = folder / "project", folder / "log"
    copy_project(copy)
    for tests in dict.fromkeys(one.tests for one in errors):
        if code := run_tests(copy, tests, log):
            sys.exit(f"{log.read_text(encoding='utf-8')}\n{tests} ended with {code} without a planted error")
    left = []
    for one in errors:
        path, start = copy / SOURCE / one.file, time.monotonic()
        path.write_text(path.read_text(encoding="utf-8").replace(one.old, one.new), encoding="utf-8")
        code = run_tests(copy, one.tests, log)
        if code in (4, 5):  # a wrong command, no tests
            sys.exit(f"{log.read_text(encoding='utf-8')}\n{one.tests} ended with {code}")
        shutil.copy2(ROOT / SOURCE / one.file, path)
        taken = f"{time.monotonic() - start:5.0f} s"
        print(f"{'noticed ' if code else 'SURVIVED'} {taken}  {one.file}: {one.what}", flush=True)  # noqa: T201
        left += [] if code else [one]
    return left


def main(words: Sequence[str]) -> None:
    """Plant the errors, and exit with 1 if one survives."""
    errors = chosen(words)
    # Importing these takes most of the time of short tests.
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    assert "depthgauge" not in sys.modules
    with tempfile.TemporaryDirectory() as folder:
        left = survivors(errors, Path(folder))
    print(f"{len(errors) - len(left)} of {len(errors)} errors noticed")  # noqa: T201
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
