"""What-ifs against a reimplementation with hooks on complete passes, and suffix passes against complete passes."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from edited_outputs import edited_outputs
from tiny_models import DECODERS, ENCODERS, MODELS, cross_entropy, tiny_model, tokens
from torch import Tensor, nn

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks.attention_calls import attending
from depthgauge.checkpoints.blocks.block_runner import BlockRunner, Stack
from depthgauge.checkpoints.blocks.model_output import window_losses
from depthgauge.checkpoints.blocks.what_if import DenseStates, Edit, edited_states, layers_of
from depthgauge.checkpoints.weights.families import FAMILIES, find_blocks
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.results.gauge_record import chosen_kinds
from depthgauge.results.labels import DEFAULT_WHAT_IFS, SCORES, WHAT_IFS

# Paths of each family's sublayers, written independently of the table under test.
SUBLAYERS = {
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gpt2": ("attn", "mlp"),
    "gpt_neox": ("attention", "mlp"),
    "gpt_neox-sequential": ("attention", "mlp"),
    "bert": ("attention.output.dense", "output.dense"),
    "roberta": ("attention.output.dense", "output.dense"),
    "xlm-roberta": ("attention.output.dense", "output.dense"),
    "camembert": ("attention.output.dense", "output.dense"),
    "electra": ("attention.output.dense", "output.dense"),
    "distilbert": ("attention", "ffn"),
}


def final(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(input_ids=ids)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def hooked(module: nn.Module, change: Callable[[tuple[Any, ...], dict[str, Any], Tensor], Tensor]) -> Any:
    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        made = change(args, kwargs, first)
        return (made, *out[1:]) if isinstance(out, tuple) else made

    return module.register_forward_hook(after, with_kwargs=True)


def plainly(name: str, model: Any, ids: Tensor, kind: str, layer: int) -> Tensor:
    """Compute one what-if with hooks on the stock eager model, without cached states."""
    model.set_attn_implementation("eager")
    blocks = find_blocks(model, 3)
    attention, mlp = SUBLAYERS.get(name, ("self_attn", "mlp"))
    with ExitStack() as hooks:
        if kind == "block":
            hooks.callback(hooked(blocks[layer], lambda args, kwargs, out: args[0]).remove)
        elif kind in ("attention", "mlp"):
            path = attention if kind == "attention" else mlp
            hooks.callback(hooked(blocks[layer].get_submodule(path), lambda args, kwargs, out: 0 * out).remove)
        elif kind == "parallel":
            kept: dict[str, Tensor] = {}

            def keep(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
                kept["x"], kept["y"] = args[0], out
                return args[0]

            hooks.callback(hooked(blocks[layer], keep).remove)
            hooks.callback(hooked(blocks[layer + 1], lambda a, k, out: out + kept["y"] - kept["x"]).remove)
        return final(model, ids)


@pytest.mark.parametrize("kind", ["block", "attention", "mlp", "parallel"])
@pytest.mark.parametrize("name", MODELS)
def test_what_ifs_equal_hooks_on_whole_passes(name: str, kind: str) -> None:
    model, ids = tiny_model(name), tokens(batch=3)
    checkpoint = wrap(model)
    assert checkpoint.objective == ("loss" if name in DECODERS else "states")
    with attending(model) as session:
        intact = final(model, ids)
        found = edited_outputs(checkpoint, ids, kind, layers_of(kind, checkpoint.families), session)
        assert torch.equal(final(model, ids), intact)  # every patch was removed
    for layer, output in enumerate(found):
        expected = plainly(name, model, ids, kind, layer)
        scale = intact.abs().max()
        assert (output - expected).abs().max() < 3e-5 * scale
        assert (expected - intact).abs().amax(dim=(1, 2)).min() > 1e-3 * scale  # the what-if changes every output


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "bert"])
def test_uniform_attention_equals_zeroed_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with stock eager attention in which the scores of one layer are replaced by zeros."""
    model, ids = tiny_model(name), tokens(batch=3)
    with attending(model) as session:
        found = edited_outputs(wrap(model), ids, "uniform", range(3), session)
    model.set_attn_implementation("eager")
    softmax = torch.nn.functional.softmax
    for layer in range(3):
        order = iter(range(3))

        def flat(x: Tensor, *args: Any, at: int = layer, calls: Any = order, **kwargs: Any) -> Tensor:
            even = torch.where(x > torch.finfo(x.dtype).min / 2, 0.0, torch.finfo(x.dtype).min)
            return softmax(even if next(calls) == at else x, *args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "softmax", flat)
        expected = final(model, ids)
        monkeypatch.undo()
        assert next(order, None) is None
        assert (found[layer] - expected).abs().max() < 3e-5 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_suffix_passes_equal_whole_passes(name: str) -> None:
    model, ids = tiny_model(name), tokens(batch=1)
    with attending(model) as session:
        stack = Stack(wrap(model), session)
        base = stack.full(ids)
        assert len(base.states) == 4
        for start in range(4):
            assert torch.equal(stack.run(ids, start=start, state=base.states[start]), base.output)
        assert stack.evaluations == 3 + 3 + 2 + 1 + 0


def test_states_are_those_before_the_final_norm() -> None:
    model, ids = tiny_model("llama"), tokens(batch=1)
    with attending(model) as session, torch.no_grad():
        base = Stack(wrap(model), session).full(ids)
        assert torch.equal(base.states[0], model.model.embed_tokens(ids))
        assert torch.allclose(model.lm_head(model.model.norm(base.states[-1])), base.output)


def test_skipped_layers_in_the_middle() -> None:
    model, ids = tiny_model("qwen3"), tokens(batch=1)
    with attending(model) as session:
        stack = Stack(wrap(model), session)
        gone = frozenset({1})
        base = stack.full(ids, skipped=gone)
        both = stack.run(ids, start=1, state=base.states[0], skipped=gone)
    model.set_attn_implementation("eager")
    blocks = find_blocks(model, 3)
    handles = [hooked(blocks[layer], lambda args, kwargs, out: args[0]) for layer in (0, 1)]
    assert torch.allclose(both, final(model, ids), atol=1e-5)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "distilbert"])
def test_a_silent_sublayer_is_not_computed_twice(name: str) -> None:
    """The first run of a module type shows the form of its output; later ones are not computed."""
    model, ids = tiny_model(name), tokens(batch=1)
    families = [family for family in wrap(model).families if family is not None]
    with attending(model) as session:
        dense = DenseStates(BlockRunner(wrap(model), ids, session), ids)
        for kind, path in (("attention", families[0].attention), ("mlp", families[0].mlp)):
            for layer in range(3):
                sublayer, computed = dense.runner.blocks[layer].get_submodule(str(path)), list[bool]()
                inner = next(module for module in sublayer.modules() if not [*module.children()])
                with inner.register_forward_hook(lambda *_, seen=computed: seen.append(True)):
                    edited_states(dense, [(Edit(layer, kind),)])
                assert bool(computed) is (layer == 0)


def test_patches_are_removed_after_errors_and_keep_a_forward_set_by_others() -> None:
    model, ids = tiny_model("llama"), tokens(batch=1)
    block = model.model.layers[0]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)  # as accelerate does
    theirs = block.forward
    with attending(model) as session:
        stack = Stack(wrap(model), session)
        base = stack.full(ids)
        with pytest.raises(RuntimeError):
            stack.run(ids, start=1, state=base.states[1][..., :3])
        assert block.forward is theirs
        assert "forward" not in model.model.layers[1].__dict__
        assert torch.equal(stack.run(ids), base.output)


def test_the_loss_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), tokens(200, batch=1) % 40
    with torch.no_grad():
        out = model(input_ids=ids[:, :60], labels=ids[:, :60])
    for entries in (1, 300, 10**6):
        monkeypatch.setattr("depthgauge.checkpoints.blocks.model_output._ENTRIES", {"cpu": entries})
        found = window_losses("loss", out.logits, ids[:, :60], out.logits)
        assert float(found) == pytest.approx(float(out.loss), rel=1e-5)


def test_objectives() -> None:
    ids = tokens(5, batch=1)
    logits = torch.randn(1, 5, 40, generator=torch.Generator().manual_seed(1))
    assert float(window_losses("loss", logits, ids, logits)) == pytest.approx(cross_entropy(logits, ids))
    assert float(window_losses("loss", 0 * logits, ids, logits)) == pytest.approx(math.log(40))
    assert float(window_losses("states", logits, ids, logits)) == 0.0
    assert float(window_losses("states", 1.5 * logits, ids, logits)) == pytest.approx(0.5)


def test_kinds_are_chosen_by_name() -> None:
    assert chosen_kinds("default") == DEFAULT_WHAT_IFS == ("block", "attention", "mlp")
    assert chosen_kinds("all") == tuple(WHAT_IFS) == ("block", "attention", "mlp", "uniform", "parallel")
    assert chosen_kinds("none") == ()
    assert chosen_kinds("parallel, block") == ("block", "parallel")
    with pytest.raises(InputError, match=r"what-if must be one of .* got 'blok'; did you mean 'block'"):
        chosen_kinds("blok")
    assert [kind for kind in WHAT_IFS if layers_of(kind, (None, None))] == ["block", "uniform", "parallel"]
    assert layers_of("uniform", (None, None), observable=False) == []


def test_every_default_and_every_score_names_a_what_if() -> None:
    assert set(DEFAULT_WHAT_IFS) <= set(WHAT_IFS)
    assert {score.what_if for score in SCORES.values()} <= set(WHAT_IFS)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_kind_costs_at_most_half_the_layers(name: str) -> None:
    model, ids = tiny_model(name), tokens(batch=2)
    with attending(model) as session:
        runner = BlockRunner(wrap(model), ids[:1], session)
        dense = DenseStates(runner, ids)
        for kind in WHAT_IFS:
            before, layers = runner.evaluations, layers_of(kind, runner.checkpoint.families)
            edited_states(dense, [(Edit(layer, kind),) for layer in layers])
            assert (runner.evaluations - before) / (2 * 3) == pytest.approx(passes_of(kind, layers, 3))
            assert passes_of(kind, range(30), 30) <= 30 / 2 + 0.5


def passes_of(kind: str, on: Sequence[int], layers: int) -> float:
    """Return the cost of a what-if on some of L layers in forward passes, (block evaluations)/L ≤ (L + 1)/2."""
    first_run = {"block": 1, "parallel": 1}.get(kind, 0)
    return sum(layers - layer - first_run for layer in on) / layers


def test_every_family_has_a_tiny_model() -> None:
    covered = {tiny_model(name).config.model_type for name in MODELS}
    assert covered == set(FAMILIES)


def test_encoders_and_decoders_are_both_covered() -> None:
    assert set(SUBLAYERS) <= set(MODELS)
    assert set(ENCODERS) <= set(SUBLAYERS)
