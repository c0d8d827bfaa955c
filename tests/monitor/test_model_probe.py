"""The measures of a probe equal those of a plain computation from transformers' own states and attentions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens

import depthgauge as dg

TOKENS = 9


def padded_batch() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": tokens(TOKENS), "attention_mask": mask}


def probe_of(model: Any, batch: Any, log: Path, **options: Any) -> dg.results.Probe:
    found = dg.Monitor(model, batch, 1, log, action="log", options=dg.results.MonitorOptions(**options)).step(
        0, loss=1.5
    )
    assert found is not None
    return found


def stock(model: Any, batch: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the states X_0 … X_L before the final norm, and the attentions, of transformers' eager attention."""
    model.set_attn_implementation("eager")
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
    states: list[torch.Tensor] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def after(module: Any, args: Any, out: Any) -> None:
        if module is blocks[-1]:
            states.append(out[0] if isinstance(out, tuple) else out)

    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    handles.append(blocks[-1].register_forward_hook(after))
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    for handle in handles:
        handle.remove()
    return states, list(out.attentions)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox", "bert", "distilbert", "olmo"])
def test_measures_equal_a_plain_computation(tmp_path: Path, name: str) -> None:
    model, batch = tiny_model(name), padded_batch()
    probe = probe_of(model, batch, tmp_path)
    states, attentions = stock(model, batch)
    real = [range(TOKENS), range(6)]
    causal = name not in ("bert", "distilbert")
    for layer in probe.layers:
        x, y = states[layer.index].double(), states[layer.index + 1].double()
        pairs = [(x[b, t], y[b, t]) for b in range(2) for t in real[b]]
        assert layer.update == pytest.approx(mean(float((q - p).norm() / p.norm()) for p, q in pairs), rel=1e-3)
        influence = 1 - mean(float(p @ q / p.norm() / q.norm()) for p, q in pairs)
        assert layer.block_influence == pytest.approx(influence, rel=1e-3, abs=1e-5)
        raw, unit = [], []
        for b in range(2):
            rows = torch.stack([y[b, t] for t in real[b]])
            for kind, values in ((raw, rows), (unit, torch.stack([row / row.norm() for row in rows]))):
                kind.append(float((values - values.mean(dim=0)).norm() / values.norm()))
        assert layer.residual_ratio == pytest.approx(mean(raw), rel=1e-4)
        assert layer.direction_ratio == pytest.approx(mean(unit), rel=1e-4)
        p = attentions[layer.index].double()
        assert layer.heads is not None
        for head in range(p.shape[1]):
            rows = [(p[b, head, t], visible(b, t, real, causal, name, layer.index)) for b in range(2) for t in real[b]]
            entropy = mean(-sum(float(v) * float(v.log()) for v in row if v > 0) for row, _ in rows)
            assert layer.heads.entropy[head] == pytest.approx(entropy, rel=1e-3, abs=1e-5)
            tv = mean(sum(abs(float(v) - (j in keys) / len(keys)) for j, v in enumerate(row)) / 2 for row, keys in rows)
            assert layer.heads.tv_mean[head] == pytest.approx(tv, rel=1e-3, abs=1e-5)
            first = mean(float(row[min(keys)]) for row, keys in rows)
            assert layer.heads.first_mass[head] == pytest.approx(first, rel=1e-3, abs=1e-6)
            if name != "gemma2":  # −log p gives the scores of a row up to a constant
                widest = max(float(row[list(keys)].log().max() - row[list(keys)].log().min()) for row, keys in rows)
                assert layer.heads.score_range[head] == pytest.approx(widest, rel=1e-3, abs=1e-4)
        assert layer.uniform_entropy == pytest.approx(
            mean(float(torch.tensor(float(len(keys))).log()) for _, keys in rows), rel=1e-5
        )


def visible(b: int, t: int, real: list[range], causal: bool, name: str, layer: int) -> set[int]:
    keys = {j for j in real[b] if j <= t or not causal}
    return {j for j in keys if j > t - 4} if name == "gemma2" and layer % 2 == 0 else keys


def mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found)


SUBLAYERS = {"llama": ("self_attn", "mlp"), "gpt2": ("attn", "mlp"), "bert": ("attention.output.dense", "output.dense")}


@pytest.mark.parametrize("name", SUBLAYERS)
def test_sublayer_updates_and_weights_equal_a_plain_computation(tmp_path: Path, name: str) -> None:
    model, batch = tiny_model(name), {"input_ids": tokens(TOKENS)}
    probe = probe_of(model, batch, tmp_path)
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
    added: list[torch.Tensor] = []

    def add(module: Any, args: Any, out: Any) -> None:
        added.append(out[0] if isinstance(out, tuple) else out)

    paths = SUBLAYERS[name]
    handles = [block.get_submodule(path).register_forward_hook(add) for block in blocks for path in paths]
    states, _ = stock(model, batch)
    for handle in handles:
        handle.remove()
    for layer in probe.layers:
        x, attention, mlp = states[layer.index], added[2 * layer.index], added[2 * layer.index + 1]
        middle = x + attention
        if name == "bert":
            middle = blocks[layer.index].attention.output.LayerNorm(middle).detach()
        assert layer.attention_update == pytest.approx(
            float((attention.norm(dim=-1) / x.norm(dim=-1)).mean()), rel=1e-4
        )
        assert layer.mlp_update == pytest.approx(float((mlp.norm(dim=-1) / middle.norm(dim=-1)).mean()), rel=1e-4)
        if name == "llama":
            qk, ov, eta = plain_circuits(blocks[layer.index])
            assert (layer.qk_norm, layer.ov_norm, layer.eta) == pytest.approx((qk, ov, eta), rel=2e-3)


def plain_circuits(block: Any) -> tuple[float, float, float]:
    """Return the largest spectral norms and |entry| over the heads of a tiny Llama: 4 heads that share 2 of width 4."""
    gain, at = block.input_layernorm.weight[:, None].double(), block.self_attn
    q, k, v = (gain * m.weight.double().T for m in (at.q_proj, at.k_proj, at.v_proj))
    qk, ov, eta = 0.0, 0.0, 0.0
    for h in range(4):
        own, shared = slice(4 * h, 4 * h + 4), slice(4 * (h // 2), 4 * (h // 2) + 4)
        value = v[:, shared] @ at.o_proj.weight.double().T[own]
        qk = max(qk, float(torch.linalg.matrix_norm(q[:, own] @ k[:, shared].T, 2).detach()))
        ov = max(ov, float(torch.linalg.matrix_norm(value, 2).detach()))
        eta = max(eta, *(float(m.detach().abs().max()) for m in (q[:, own], k[:, shared], value)))
    return qk, ov, eta


def test_the_loss_is_the_models_own_and_skipping_a_block_costs_what_it_costs(tmp_path: Path) -> None:
    model, batch = tiny_model("llama"), padded_batch()
    probe = probe_of(model, batch, tmp_path, what_if_every=1, depth=0.5)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        intact = float(model(**batch, labels=labels, use_cache=False).loss)
        assert probe.probe_loss == pytest.approx(intact, rel=1e-5)
        assert probe.loss == 1.5

        def cost(removed: set[int]) -> float:
            blocks = torch.nn.ModuleList(b for k, b in enumerate(whole) if k not in removed)
            model.model.layers, model.config.num_hidden_layers = blocks, len(blocks)
            try:
                return float(model(**batch, labels=labels, use_cache=False).loss) - intact
            finally:
                model.model.layers, model.config.num_hidden_layers = whole, 3

        whole = model.model.layers
        assert [layer.skip_loss for layer in probe.layers] == pytest.approx([cost({k}) for k in range(3)], abs=1e-4)
        removed: set[int] = set()
        while len(removed) < 2:
            best = min((k for k in range(3) if k not in removed), key=lambda k: cost(removed | {k}))
            if cost(removed | {best}) > 0.5:
                break
            removed |= {best}
    assert probe.depth == 3 - len(removed)


def test_labels_of_the_batch_are_used_and_an_encoder_without_them_has_states(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=40)
    model = BertForMaskedLM(config).eval()
    ids = tokens(8)
    labels = torch.where(torch.arange(8) % 3 == 0, ids, -100)
    probe = probe_of(model, {"input_ids": ids, "labels": labels}, tmp_path / "a", what_if_every=1)
    with torch.no_grad():
        assert probe.probe_loss == pytest.approx(float(model(input_ids=ids, labels=labels).loss), rel=1e-5)
    assert all(layer.skip_loss is not None for layer in probe.layers)
    probe = probe_of(model, ids, tmp_path / "b", what_if_every=1)
    assert probe.probe_loss is None
    whole = model.bert.encoder.layer
    with torch.no_grad():
        intact = model.bert(input_ids=ids).last_hidden_state
        model.bert.encoder.layer = torch.nn.ModuleList([whole[1]])
        change = float((model.bert(input_ids=ids).last_hidden_state - intact).norm() / intact.norm())
    assert probe.layers[0].skip_loss == pytest.approx(change, rel=1e-3)


@pytest.mark.parametrize("name", ["olmo", "granite", "mixtral", "lfm2", "bloom", "mpnet"])
def test_sublayers_outside_the_table_are_derived(tmp_path: Path, name: str) -> None:
    model, ids, seen = tiny_model(name), tokens(8), list[torch.Tensor]()
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    monitor = dg.Monitor(model, ids, 1, tmp_path, action="log")
    probe = monitor.step(0)
    assert probe is not None
    kind = model.config.model_type
    assert monitor.notes[0] == (
        f"the sizes of the weights are not measured: the projections of {kind!r} models are not known"
    )
    assert not any("sublayers" in note for note in monitor.notes)
    assert all(layer.attention_update is not None and layer.mlp_update is not None for layer in probe.layers)
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if name == "granite":  # by hand: what attention adds to the stream in layer 1, with the residual multiplier 0.22
        block = model.model.layers[1]
        block.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        block.self_attn.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        with torch.no_grad():
            model(input_ids=ids)
        expected = (0.22 * seen[1].norm(dim=-1) / seen[0].norm(dim=-1)).mean()
        assert probe.layers[1].attention_update == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("name", ["mamba", "nemotron_h", "rwkv", "zamba2"])
def test_blocks_without_attention_are_monitored(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    monitor = dg.Monitor(
        model, tokens(8), 1, tmp_path, action="log", options=dg.results.MonitorOptions(what_if_every=1)
    )
    probe = monitor.step(0)
    assert probe is not None
    for layer in probe.layers:
        assert layer.heads is None
        assert layer.update is not None
        assert layer.skip_loss is not None
        assert (layer.mlp_update is not None) == (name == "rwkv" and layer.index > 0)
    assert any("heads are not measured" in note for note in monitor.notes)
    assert any("the sublayers" in note for note in monitor.notes) == (name == "rwkv")
    assert monitor.step(1) is not None


def test_only_the_first_tokens_of_a_large_batch_are_used(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(40, batch=7)
    mask = torch.ones_like(ids)
    cut = probe_of(
        model, {"input_ids": ids, "attention_mask": mask, "labels": ids}, tmp_path / "a", sequences=3, tokens=10
    )
    same = probe_of(model, ids[:3, :10], tmp_path / "b", sequences=3)
    assert cut.to_json() | {"seconds": 0} == same.to_json() | {"seconds": 0}


def test_a_model_that_bypasses_the_attention_interface_is_measured_without_heads(tmp_path: Path) -> None:
    model = tiny_model("mpnet")
    monitor = dg.Monitor(model, tokens(8), 1, tmp_path, action="log")
    probe = monitor.step(0)
    assert probe is not None
    assert all(layer.heads is None and layer.update is not None for layer in probe.layers)
    notes = dg.results.read_log(tmp_path).run.notes
    assert notes == monitor.notes
    assert any("heads are not measured: MPNetModel made 0 observed attention calls" in note for note in notes)


@pytest.mark.parametrize(
    ("model", "probe", "words"),
    [
        ("linear", torch.zeros(2, 4, dtype=torch.long), "model must be a transformers model or a SelfAttentionNetwork"),
        ("llama", torch.zeros(2, 4), "probe must contain input_ids, whole numbers of shape"),
        ("llama", {"ids": torch.zeros(2, 4)}, "probe must contain input_ids, whole numbers of shape"),
        ("llama", [1, 2, 3], "probe must be a batch of the model, a mapping with input_ids or a tensor"),
        ("llama", torch.zeros(2, 1, dtype=torch.long), "the sequences of the probe must have at least 2 tokens, got 1"),
        ("albert", torch.zeros(2, 4, dtype=torch.long), "does not keep its blocks in one list of 3 modules"),
        ("llama", torch.ones(2, 4, dtype=torch.bool), "probe must contain input_ids, whole numbers of shape"),
        ("vit", tokens(8), "ViTModel cannot be monitored: it has no embedding of token ids"),
        (
            "resnet",
            tokens(8),
            "ResNetModel is a resnet model without layers: its configuration has no",
        ),
        (
            "llama",
            torch.tensor([[3, 39, 7], [99, 1, 2]]),
            "input_ids of the probe contain the token id 99, but the embedding of LlamaForCausalLM has 40 rows, for "
            "ids from 0 to 39; use the tokenizer of this model",
        ),
        ("llama", torch.tensor([[3, -1, 7]]), "contain the token id -1, but the embedding"),
        (
            "llama",
            {"input_ids": tokens(4), "labels": torch.tensor([[1, 2, -100, 40]] * 2)},
            "labels of the probe contain the token id 40, but the output of LlamaForCausalLM has 40 rows",
        ),
        (
            "llama",
            {"input_ids": tokens(6), "attention_mask": torch.tensor([[1] * 6, [0] * 5 + [1]])},
            "a sequence of the probe has fewer than 2 tokens that are no padding among its first 256",
        ),
    ],
)
def test_what_cannot_be_monitored_is_refused(tmp_path: Path, model: str, probe: Any, words: str) -> None:
    made = torch.nn.Linear(2, 2) if model == "linear" else without_attention(model) or tiny_model(model)
    with pytest.raises(dg.InputError, match=words):
        dg.Monitor(made, probe, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def without_attention(name: str) -> Any:
    """Return a transformers model that has no attention, or that does not read tokens; None for other names."""
    from transformers import ResNetConfig, ResNetModel, ViTConfig, ViTModel

    if name == "vit":
        size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        return ViTModel(ViTConfig(**size, image_size=32))
    return ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])) if name == "resnet" else None
