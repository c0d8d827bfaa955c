#!/usr/bin/env bash
# Build the sdist and the wheel, install the wheel into an environment of its own, and use it outside the source tree.
#
#     scripts/check_wheel.sh [PYTHON]     PYTHON has the extra `dev`; by default .venv/bin/python
#
# The dependencies are those of PYTHON. That those of pyproject.toml are enough is checked by check_readme.py.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="$(realpath -s "${1:-$root/.venv/bin/python}")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export PIP_CONSTRAINT="$root/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1

# `build` makes the sdist, and the wheel from the sdist: a file that is missing from the sdist is missing below.
"$python" -m build --outdir "$work/dist" "$root" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
wheel="$(ls "$work"/dist/*.whl)"
echo "built $(basename "$wheel") ($(stat -c %s "$wheel") bytes) and $(basename "$work"/dist/*.tar.gz)"

"$python" -m venv --without-pip "$work/venv"
"$python" -m pip --python "$work/venv/bin/python" install --quiet --no-deps "$wheel"
# After the installation, because pip would see the project here. The line does not make Python read the .pth files of
# that folder, so that its editable installation of the project has no effect.
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$packages" >"$("$work/venv/bin/python" -c "$packages")/dependencies.pth"

mkdir "$work/elsewhere"
cd "$work/elsewhere"
depthgauge="$work/venv/bin/depthgauge"
"$depthgauge" --version
"$depthgauge" gauge --samples 1 --tokens 16 --out r.json --report r.html >tables.txt
"$depthgauge" report r.json --out again.html
cmp r.html again.html
# The model of the demonstration on the built-in text, which are data files of the package.
"$work/venv/bin/python" -c "from pathlib import Path; from depthgauge.workflows.demo import write_demo; write_demo(Path('demo'))"
"$depthgauge" gauge demo/model --tokens 32 --window 16 --what-if block --out model.json >>tables.txt
"$work/venv/bin/python" - "$work/venv" <<'PY'
import json
import sys
from pathlib import Path

import depthgauge as dg

assert Path(dg.__file__).is_relative_to(sys.argv[1]), f"imported from {dg.__file__}, not from the installed wheel"
assert (Path(dg.__file__).parent / "py.typed").is_file(), "py.typed is not in the wheel"
(model,) = json.loads(Path("model.json").read_text(encoding="utf-8"))["subjects"]
assert model["text"]["tokens"] == 32, model["text"]
net = dg.random_network(layers=3, heads=1, dim=4, eta=0.01, seed=0)
cert = dg.certify(net, dg.collapse(net), radius=1.0)
assert cert.verify() and 0 < cert.lower <= cert.upper
PY
echo "the wheel works outside the source tree"
