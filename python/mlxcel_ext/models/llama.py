"""The forward pass of the llama family: Llama, SmolLM, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .. import env
from ..ops import swiglu
from ..ops.decoder_stack import DecoderLayer
from ..ops.device import on_cpu
from ..ops.memory import use_huge_pages
from .batch import AttentionBatch
from .config import ModelConfig
from .decoder_stack import DecoderStack, KVPages
from .linear import Embedding, Linear
from .progress import Progress
from .rope import inverse_frequencies
from .unfused import Kernels, choose_kernels

if TYPE_CHECKING:
    from .loader import Weights
    from .weights import Weight


class Projection:
    """Several linear layers of one input, joined by rows where their formats allow: one matmul for all."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self._linears: list[Linear] = []
        for layer in layers:
            if self._linears and Linear.can_join([self._linears[-1], layer]):
                self._linears[-1] = Linear.join([self._linears[-1], layer])
            else:
                self._linears.append(layer)

    def __call__(self, x: mx.array) -> mx.array:
        """[tokens, sum of out_features]."""
        parts = [linear(x) for linear in self._linears]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    @property
    def arrays(self) -> list[mx.array]:
        return [a for linear in self._linears for a in linear.arrays]

    @property
    def linears(self) -> list[Linear]:
        return self._linears


class Model:
    """A model of the family.

    Parameters
    ----------
    config : ModelConfig
        Shapes, and which of the family's options are on.
    weights : Weights
        Where the tensors come from; each is read when its layer is built.
    dtype : mx.Dtype
        Of activations, norms and biases. Matrices stay as they are stored.
    step : Progress
        Called after each layer.
    """

    def __init__(self, config: ModelConfig, weights: Weights, dtype: mx.Dtype, step: Progress) -> None:
        self.config, self.dtype = config, dtype
        self._kernels = choose_kernels()
        #: For the counters: "fused_v2", or "gather" where MLXCEL_PAGED_ATTENTION_V2 is off.
        self.attention_path = self._kernels.attention_path
        #: Of the pages: on CPU a head's keys lie side by side, so that a task reads memory front to back. What falls
        #: back to MLX's ops knows NHD alone.
        self.kv_layout = "HND" if self._kernels.all_fused and on_cpu(None) else "NHD"
        hidden = config.hidden_size
        self._embedding = Embedding(*_fields(weights.take(f"{_EMBEDDING}.weight", config.vocab_size, hidden)))
        self._norm = weights.vector("model.norm.weight", hidden, dtype)
        self._head: Linear = self._embedding
        if not config.tie_word_embeddings:
            self._head = Linear(*_fields(weights.take("lm_head.weight", config.vocab_size, hidden)))
        frequencies, rope_scale = inverse_frequencies(config, weights.rope_divisors(config.rotary_dim // 2))
        rope = _Rope(mx.array(frequencies, mx.float32), rope_scale)
        mx.eval(self._embedding.arrays, self._head.arrays, self._norm, rope.inv_freq)
        self._layers = []
        for index in range(config.num_layers):
            layer = _Layer(config, weights, index, dtype, rope, self._kernels)
            mx.eval(layer.arrays)
            self._layers.append(layer)
            step(index + 1, config.num_layers)
        held = [self._embedding.arrays, self._head.arrays, *(layer.arrays for layer in self._layers)]
        use_huge_pages([a for arrays in held for a in arrays])
        self._stack = self._make_stack(rope)

    def __call__(self, tokens: mx.array, batch: AttentionBatch, kv: KVPages) -> mx.array:
        """Append the tokens to the pages and predict what follows them.

        Parameters
        ----------
        tokens : mx.array
            int32 ``[nnz]``.
        batch : AttentionBatch
            Their requests.
        kv : KVPages
            The pages. Written in place; `kv` gets the handles that the next step must use.

        Returns
        -------
        mx.array
            ``[len(batch.logit_rows), vocab_size]`` (``nnz`` rows where logit_rows is None), activation dtype.
        """
        # The residual stream crosses layers un-normalised: every add is fused with the norm that follows it.
        residual = self._embedding.rows(tokens, self.dtype)
        if self._stack is not None and self._stack.takes(batch):
            return self._head(self._stack(residual, batch, kv))
        x = self._layers[0].rms_norm(residual, self._layers[0].input_norm)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = layer.attend(x, batch, kv, index)
            if index == last and batch.logit_rows is not None:
                # Behind the last attention a token meets no other: the rest is dead weight.
                attended, residual = attended[batch.logit_rows], residual[batch.logit_rows]
            following = self._norm if index == last else self._layers[index + 1].input_norm
            x, residual = layer.transform(attended, residual, following)
        return self._head(x)

    def _make_stack(self, rope: _Rope) -> DecoderStack | None:
        """All layers as one primitive, where our kernels know every one of them."""
        if not self._kernels.all_fused or not env.switch("MLXCEL_FUSED_LAYERS"):
            return None
        known = [layer.stack_layer() for layer in self._layers]
        layers = [layer for layer in known if layer is not None]
        if len(layers) < len(known):
            return None
        return DecoderStack(self.config, layers, self._norm, rope.inv_freq, rope.scale)


class _Rope:
    def __init__(self, inv_freq: mx.array, scale: float) -> None:
        self.inv_freq, self.scale = inv_freq, scale


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        index: int,
        dtype: mx.Dtype,
        rope: _Rope,
        kernels: Kernels,
    ) -> None:
        self._config, self._rope, self._window = config, rope, config.windows[index]
        self._kernels = kernels
        prefix = f"model.layers.{index}"
        hidden, head_dim = config.hidden_size, config.head_dim
        qo_size, kv_size = config.num_qo_heads * head_dim, config.num_kv_heads * head_dim

        def linear(name: str, rows: int, cols: int, has_bias: bool) -> Linear:
            stored = weights.take(f"{prefix}.{name}.weight", rows, cols)
            return Linear(
                *_fields(stored, weights.vector(f"{prefix}.{name}.bias", rows, dtype) if has_bias else None)
            )

        self.input_norm = weights.vector(f"{prefix}.input_layernorm.weight", hidden, dtype)
        self._post_norm = weights.vector(f"{prefix}.post_attention_layernorm.weight", hidden, dtype)
        sizes = {"q_proj": qo_size, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv = Projection(
            [linear(f"self_attn.{name}", size, hidden, config.qkv_bias) for name, size in sizes.items()]
        )
        self._output = linear("self_attn.o_proj", hidden, qo_size, config.output_bias)
        gate_up = [linear(f"mlp.{n}", config.intermediate_size, hidden, config.mlp_bias) for n in _GATE_UP]
        self._gate_up = Projection(gate_up)
        self._down = linear("mlp.down_proj", hidden, config.intermediate_size, config.mlp_bias)
        self._head_norms = [
            weights.vector(f"{prefix}.self_attn.{name}.weight", head_dim, dtype)
            for name in (("q_norm", "k_norm") if config.qk_norm else ())
        ]

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that the layer keeps, to be read from the file in one go."""
        matrices = [*self._qkv.arrays, *self._output.arrays, *self._gate_up.arrays, *self._down.arrays]
        return [self.input_norm, self._post_norm, *matrices, *self._head_norms]

    def stack_layer(self) -> DecoderLayer | None:
        """The layer as DecoderStack takes it; None where our kernels do not know a matrix."""
        groups = (self._qkv.linears, [self._output], self._gate_up.linears, [self._down])
        qkv, output, gate_up, down = ([linear.stack_layer() for linear in group] for group in groups)
        if None in (*qkv, *output, *gate_up, *down):
            return None
        q_norm, k_norm = self._head_norms or (None, None)
        return DecoderLayer(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            input_norm=self.input_norm,
            post_norm=self._post_norm,
            q_norm=q_norm,
            k_norm=k_norm,
            window_left=self._window,
        )

    def attend(self, x: mx.array, batch: AttentionBatch, kv: KVPages, index: int) -> mx.array:
        """[tokens, num_qo_heads * head_dim]: what the tokens read from the pages, theirs included."""
        config = self._config
        heads, kv_heads, head_dim = config.num_qo_heads, config.num_kv_heads, config.head_dim
        qkv = self._qkv(x).reshape(-1, heads + 2 * kv_heads, head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self._head_norms:
            q, k = (self.rms_norm(a, norm) for a, norm in zip((q, k), self._head_norms, strict=True))
        q, k_pages, v_pages = self._kernels.rope_append(
            q,
            k,
            v,
            kv.k_pages[index],
            kv.v_pages[index],
            batch.table,
            batch.positions,
            inv_freq=self._rope.inv_freq,
            scale=self._rope.scale,
            qo_indptr=batch.qo_indptr,
            kv_layout=kv.layout,
        )
        kv.k_pages[index], kv.v_pages[index] = k_pages, v_pages
        out = self._kernels.paged_attention(
            q,
            k_pages,
            v_pages,
            batch.table,
            qo_indptr=batch.qo_indptr,
            window_left=self._window,
            plan=batch.plan,
            kv_layout=kv.layout,
        )
        assert isinstance(out, mx.array)
        return out.reshape(-1, heads * head_dim)

    def transform(
        self, attended: mx.array, residual: mx.array, following: mx.array
    ) -> tuple[mx.array, mx.array]:
        """`(normed input of what follows, residual stream)` behind attention and MLP."""
        eps = self._config.rms_norm_eps
        x, residual = self._kernels.add_rms_norm(self._output(attended), residual, self._post_norm, eps)
        return self._kernels.add_rms_norm(self._down(swiglu(self._gate_up(x))), residual, following, eps)

    def rms_norm(self, x: mx.array, weight: mx.array) -> mx.array:
        """The norm of a value that has no residual to be added."""
        return self._kernels.add_rms_norm(x, mx.zeros_like(x), weight, self._config.rms_norm_eps)[0]


_EMBEDDING = "model.embed_tokens"
_GATE_UP = ("gate_proj", "up_proj")


def _fields(
    stored: Weight, bias: mx.array | None = None
) -> tuple[mx.array, mx.array | None, mx.array | None, mx.array | None, int, int, str]:
    """A stored matrix as Linear's arguments."""
    return stored.weight, stored.scales, stored.biases, bias, stored.group_size, stored.bits, stored.mode
