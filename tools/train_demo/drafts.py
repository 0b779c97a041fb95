"""The draft blocks over many anchors at once, differentiable.

An *anchor* is a position of a sequence whose token is known to be next and has not been through
the network: the golden token of a block. The block's rows stand at the anchor's position and the
following ones; all of them see the main keys of the window before the anchor and each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.train_demo.functions import Collapse
from tools.train_demo.network import Network


@dataclass(frozen=True)
class Anchors:
    """Places of blocks in a batch of sequences of ``length`` tokens."""

    sequence: Tensor
    """int64 ``[A]``."""
    position: Tensor
    """int64 ``[A]``, at least 1."""
    length: int


@dataclass
class DraftForward:
    """Result of a pass over blocks of ``n`` rows."""

    normed: Tensor
    """``[A * n, D]`` behind the last norm."""
    hidden: Tensor
    """``[A * n, D]`` before it, for the confidence head."""
    loads: dict[str, Tensor]


@dataclass
class DraftNetwork:
    """The draft blocks of a network, in its precision."""

    network: Network

    def main_keys(self, w: dict[str, Tensor], features: Tensor, batch: int) -> list[Tensor]:
        """Window keys ``[B * T, Dh]`` of every draft block from features ``[B * T, targets * D]``.

        The features of all target layers stand side by side.
        """
        net, c = self.network, self.network.config
        assert c.draft is not None
        x = net.quantize(features) @ w["mtp.0.main_proj"].t()
        y = net.quantize(net.norm(x, w["mtp.0.main_norm.weight"]))
        length = len(y) // batch
        cosine, sine = net.turns(False, length, 1)
        keys = []
        for block in range(c.draft.num_layers):
            prefix = f"mtp.{block}.attn."
            plain = y @ w[prefix + "wqkv_a"][c.q_lora_rank :].t()
            plain = net.norm(plain, w[prefix + "kv_norm.weight"]).view(batch, length, -1)
            keys.append(net.quantize(net.turned(plain, cosine, sine)).flatten(0, 1))
        return keys

    def __call__(
        self,
        w: dict[str, Tensor],
        golden: Tensor,
        anchors: Anchors,
        main: list[Tensor],
        count: int,
    ) -> DraftForward:
        """Run blocks of ``count`` rows behind golden tokens int64 ``[A]``."""
        net, c = self.network, self.network.config
        assert c.draft is not None
        ids = torch.full((len(golden), count), c.draft.noise_token_id)
        ids[:, 0] = golden
        trunk, mix = net.enter(w, ids.flatten())
        place = (anchors.position[:, None] + torch.arange(count)).flatten()
        cosine, sine = net.turns(False, anchors.length + count, 1)
        cosine, sine = cosine[place].contiguous(), sine[place].contiguous()
        rows, visible = self._window(anchors)
        loads = {}
        for block in range(c.draft.num_layers):
            prefix = f"mtp.{block}."
            x, flat = Collapse.apply(trunk, mix, w[prefix + "attn_norm.weight"], c.rms_norm_eps)
            _, query, own = net.queries_and_keys(w, prefix + "attn.", x[None], cosine, sine)
            near = torch.nn.functional.embedding(rows, main[block])
            keys = torch.cat((near, own.view(len(golden), count, -1)), 1)
            out = self._attend(
                query.view(len(golden), count, c.num_attention_heads, -1),
                keys,
                visible,
                w[prefix + "attn.attn_sink"],
            )
            out = out.reshape(1, -1, c.num_attention_heads, c.head_dim)
            out = net.project(w, prefix + "attn.", out, cosine, sine)
            trunk, mix = net.leave(w, prefix + "hc_attn", trunk, flat, out)
            x, flat = Collapse.apply(trunk, mix, w[prefix + "ffn_norm.weight"], c.rms_norm_eps)
            out, load = net.experts(w, prefix, x, c.draft.num_experts_per_tok)
            loads[prefix + "ffn.gate.bias"] = load
            trunk, mix = net.leave(w, prefix + "hc_ffn", trunk, flat, out)
        hidden = (mix[:, : c.hc_mult, None] * trunk.float()).sum(1).to(trunk.dtype)
        last = f"mtp.{c.draft.num_layers - 1}."
        return DraftForward(net.norm(hidden, w[last + "norm.weight"]), hidden, loads)

    def _window(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Rows of the main keys before every anchor ``[A, W]``, and which of them exist."""
        window = self.network.config.sliding_window
        place = anchors.position[:, None] - window + torch.arange(window)
        rows = anchors.sequence[:, None] * anchors.length + place.clamp(min=0)
        return rows, place >= 0

    def _attend(self, query: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
        """``[A, n, H, Dh]`` over ``[A, W + n, Dh]``; every row sees the whole block."""
        blocks, count, heads, width = query.shape
        logits = torch.bmm(query.reshape(blocks, -1, width), keys.transpose(1, 2)).float()
        logits = logits * self.network.config.softmax_scale
        shown = torch.nn.functional.pad(visible, (0, count), value=True)
        logits = logits.masked_fill(~shown[:, None], -1e30)
        rest = sink.repeat(count)[None, :, None].expand(blocks, -1, 1)
        share = torch.cat((logits, rest), 2).softmax(2)[..., :-1]
        return torch.bmm(share.to(keys.dtype), keys).view(blocks, count, heads, width)

    def markov(self, w: dict[str, Tensor], previous: Tensor) -> Tensor:
        """Embeddings ``[R, rank]`` of the tokens before the drafts."""
        c = self.network.config
        assert c.draft is not None
        table = w[f"mtp.{c.draft.num_layers - 1}.markov_head.embed.weight"]
        return torch.nn.functional.embedding(previous, table)

    def joint_head(self, w: dict[str, Tensor]) -> Tensor:
        """Output and Markov head side by side ``[V, D + rank]``: one product gives the logits."""
        c = self.network.config
        assert c.draft is not None
        bias = w[f"mtp.{c.draft.num_layers - 1}.markov_head.head.weight"]
        return torch.cat((w["head.weight"], bias), 1)

    def confidence(self, w: dict[str, Tensor], hidden: Tensor, embedding: Tensor) -> Tensor:
        """Logits of the acceptance of every row, fp32 ``[R]``."""
        c = self.network.config
        assert c.draft is not None
        weight = w[f"mtp.{c.draft.num_layers - 1}.confidence_head.proj.weight"].float()
        return torch.cat((hidden, embedding), 1).float() @ weight[0]
