"""Claim: a command that is refused without reading weights takes at most 1.5 seconds of processor time.

Importing torch and transformers alone takes longer. Measured in fresh processes, as a user starts them; processor time,
because it does not depend on other work on the machine.

    python benchmarks/start_times.py
"""

import os
import resource
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ALLOWED = 1.5
RUNS = 3
COMMANDS = {
    "--help": 0,
    "gauge nowhere/at/all": 2,
    "gauge no-json": 2,
    "gauge unknown-type": 2,
    "gauge cut-weights": 2,
    "gauge cut.gguf": 2,
    "gauge cut-weights --data nowhere": 2,
    "gauge whisper": 2,
    "shrink unknown-type --remove 1 --out smaller": 2,
    "evaluate unknown-type": 2,
    "evaluate cut-weights --tasks no_such_task": 2,
    "gauge org/not-in-the-cache": 2,
}
"""Commands and their exit codes."""
IMPORTS = "import torch, transformers.models.auto.modeling_auto"
"""What every command that reads weights imports."""


def make_inputs(folder: Path) -> None:
    """Write the files that the commands are given."""
    for name, config in (("no-json", "{"), ("unknown-type", '{"model_type": "none"}'), ("cut-weights", "{}")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config.replace("{}", '{"model_type": "llama"}'))
        (folder / name / "model.safetensors").write_bytes(b"cut")
    (folder / "whisper").mkdir()
    config = '{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 80}'
    (folder / "whisper" / "config.json").write_text(config)
    (folder / "whisper" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    tokens = b"".join(struct.pack("<Q", 5) + b"token" for _ in range(262_144))  # as many as Gemma has
    key = b"tokenizer.ggml.tokens"
    header = struct.pack("<4sIQQQ", b"GGUF", 3, 1, 1, len(key)) + key + struct.pack("<IIQ", 9, 8, 262_144) + tokens
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 1_000_000, 0, 0)
    (folder / "cut.gguf").write_bytes(header + tensor)


def processor_seconds(command: list[str], folder: Path, code: int) -> float:
    """Run a command and return the processor time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == code, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Measure, print, and return 1 if the claim is not met."""
    slowest = 0.0
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name))
        for words, code in COMMANDS.items():
            command = [sys.executable, "-m", "depthgauge", *words.split()]
            seconds = min(processor_seconds(command, Path(name), code) for _ in range(RUNS))
            slowest = max(slowest, seconds)
            print(f"{seconds:5.2f} s  depthgauge {words}")
        seconds = min(processor_seconds([sys.executable, "-c", IMPORTS], Path(name), 0) for _ in range(RUNS))
        print(f"{seconds:5.2f} s  for comparison: {IMPORTS}")
    print(f"slowest refusal: {slowest:.2f} s, allowed: {ALLOWED} s")
    return int(slowest > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
