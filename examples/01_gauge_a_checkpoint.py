# %% [markdown]
# # Gauge a checkpoint
#
# This example trains a tiny Llama for a few seconds, saves it as transformers does, and asks depthgauge what each of
# its layers is worth. Replace `folder` by the directory of your own model. It needs the extra `models`.

# %%
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import depthgauge as dg

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A small model
#
# The text is a cycle of sentences. A word tokenizer and a Llama with four layers are enough to learn it.

# %%
sentences = [
    "the river is deep in spring .",
    "the lake is wide and the river is narrow .",
    "in summer the river is low and the lake is warm .",
    "the boat is on the lake in summer and on the river in spring .",
]
text = " ".join(sentences * 40)
(folder / "corpus.txt").write_text(text, encoding="utf-8")

vocabulary = {word: index for index, word in enumerate(["?", *sorted(set(text.split()))])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)

# %%
ids = torch.tensor(tokenizer(text)["input_ids"])
batch = ids[: 16 * 48].reshape(16, 48)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(41):
    loss = model(batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"training step {step:2d}: loss {loss.item():.2f}")

model.save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")

# %% [markdown]
# ## Gauge it
#
# `what_if="block,attention,mlp"` removes every block, every attention sublayer and every MLP in turn and measures the
# loss.

# %%
options = dg.GaugeOptions(tokens=192, window=48, what_if="block,attention,mlp")
result = dg.gauge(folder / "model", text=folder / "corpus.txt", options=options)
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
