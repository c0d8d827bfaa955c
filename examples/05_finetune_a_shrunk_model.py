# %% [markdown]
# # Fine-tune a shrunk model with LoRA
#
# A shrunk model is an ordinary transformers checkpoint, so the usual tools work on it. This script trains low-rank
# adapters with peft on a text, merges them into the weights, and saves a checkpoint of the same shape.
#
#     pip install "depthgauge[models]" peft
#     depthgauge shrink ./model --text corpus.txt --remove 25% --recover 2M --out smaller
#     python examples/05_finetune_a_shrunk_model.py smaller corpus.txt --steps 200 --out tuned

# %% Arguments: a checkpoint, a text, and how long to train.
import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description="Fine-tune a checkpoint with LoRA on a plain text.")
parser.add_argument("model", type=Path)
parser.add_argument("text", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--window", type=int, default=256)
parser.add_argument("--batch", type=int, default=4)
options = parser.parse_args()
if options.out.exists():
    parser.error(f"{options.out} exists; choose another name")

# %% The model in float32, and the text in windows. Every tenth window is held out.
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
text = options.text.read_text(encoding="utf-8")
ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
width = options.window - len(start)
windows = ids[: len(ids) // width * width].view(-1, width)
windows = torch.cat([torch.tensor(start, dtype=torch.long).expand(len(windows), -1), windows], dim=1)
held_out, training = windows[::10][:16], windows[torch.arange(len(windows)) % 10 != 0]

# %% Adapters of rank 8 on all linear maps except the output layer.
torch.manual_seed(0)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
model.print_trainable_parameters()


# %% The loss per token on the held-out windows.
@torch.no_grad()
def held_out_loss() -> float:
    model.eval()
    losses = [model(input_ids=part.to(device), labels=part.to(device)).loss for part in held_out.split(options.batch)]
    return float(torch.stack(losses).mean())


# %% Train with AdamW; the rate falls linearly to zero.
before = held_out_loss()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.steps)
for step in range(options.steps):
    model.train()
    batch = training[torch.randint(len(training), (options.batch,))].to(device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {float(loss.detach()):.3f}")
print(f"held-out loss {before:.3f} → {held_out_loss():.3f} after {options.steps} steps")

# %% Merge the adapters. The result loads like the model that it was made from.
model.merge_and_unload().save_pretrained(options.out)
tokenizer.save_pretrained(options.out)
print(f"written to {options.out}")
