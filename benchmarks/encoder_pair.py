"""The same encoder twice, with our attention and with torch's: a part of attention_dropin.py.

Without a checkpoint it is a BERT encoder with the sizes of MiniLM and random weights.
"""

import copy
from typing import Any

import torch
from fresh_tensors import Call, Contender

import depthgauge as dg

MINILM = {
    "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
    "intermediate_size": 1536, "max_position_embeddings": 512,
}  # fmt: skip
QUERY_GAIN = 13.0
"""The factor of the random query weights: the scores then have a standard deviation of about 2."""


def encoder(path: str | None) -> Any:
    """Load a checkpoint, or build an encoder with scores as large as those of a trained model."""
    import transformers

    if path is not None:
        return transformers.AutoModel.from_pretrained(path).eval()
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**MINILM), add_pooling_layer=False).eval()
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight *= QUERY_GAIN
    return model


class EncoderPair:
    """An encoder in one dtype, once with `dg.register_attention` and once with stock SDPA."""

    def __init__(self, stock: Any, dtype: torch.dtype, device: torch.device, tolerance: float) -> None:
        dg.register_attention(tolerance=tolerance)
        self.models = {name: copy.deepcopy(stock).to(device, dtype) for name in ("object", "SDPA")}
        self.models["object"].set_attn_implementation("depthgauge")
        self.models["SDPA"].set_attn_implementation("sdpa")
        self.dtype, self.device = dtype, device

    def draw(self, batch: int, n: int, is_padded: bool) -> Call:
        """Draw token ids, as q, and a padding mask, as k and v. A quarter of the tokens is padding if `is_padded`."""
        ids = torch.randint(0, self.models["SDPA"].config.vocab_size, (batch, n), device=self.device)
        mask = torch.ones_like(ids)
        if is_padded:
            mask[:, n - n // 4 :] = 0
        return Call(ids, mask, mask)

    def contenders(self, is_padded: bool) -> list[Contender]:
        """Return the forward passes of both models, ours first."""

        def contender(name: str) -> Contender:
            def run(call: Call) -> object:
                with torch.no_grad():
                    mask = call.k if is_padded else None
                    return self.models[name](input_ids=call.q, attention_mask=mask).last_hidden_state

            return Contender(name, run)

        return [contender("object"), contender("SDPA")]

    def gap(self, call: Call, is_padded: bool) -> float:
        """Return the relative difference of the two outputs in Frobenius norm."""
        mine, theirs = (contender.run(call).double() for contender in self.contenders(is_padded))  # type: ignore[attr-defined]
        return float((mine - theirs).norm() / theirs.norm())
