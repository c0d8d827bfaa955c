# %% [markdown]
# # Gauge a checkpoint
#
# This example takes the tiny trained Llama that depthgauge brings along, and asks what each of its layers is worth.
# Replace `folder / "model"` by the directory of your own model, and the text by one like those that it reads. It needs
# the extra `models`.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import depthgauge as dg

folder = Path(tempfile.mkdtemp()) / "demo"
subprocess.run([sys.executable, "-m", "depthgauge", "demo", "--files-only", "--out", folder], check=True)
print((folder / "text.txt").read_text(encoding="utf-8").splitlines()[0])

# %% [markdown]
# ## Gauge it
#
# `what_if="block,attention,mlp"` removes every block, every attention sublayer and every MLP in turn and measures the
# loss.

# %%
options = dg.GaugeOptions(tokens=1024, what_if="block,attention,mlp")
result = dg.gauge(folder / "model", text=folder / "text.txt", options=options)
result.save(folder / "result.json")

# %%
subject = result.to_json()["subjects"][0]
print(f"\nloss of the intact model: {subject['baseline']['loss']:.2f} nats per token")
print("layer  without the block      without attention  without the MLP")
for layer in subject["layers"]:
    block, attention, mlp = (layer["what_if"][kind] for kind in ("block", "attention", "mlp"))
    interval = f"[{block['low']:.2f}, {block['high']:.2f}]"
    print(f"{layer['index']:5d}  {block['loss']:5.2f} {interval:15s}  {attention['loss']:17.2f}  {mlp['loss']:15.2f}")

# %%
print()
for row in subject["scores"]:
    correlation = "undefined" if row["spearman"] is None else f"{row['spearman']:.2f}"
    print(f"{row['score']:17s} ranks the layers with correlation {correlation}")
