"""Whole native steps for the engine: the format and arithmetic of each weight, and batches as the kernels read them.

It does not know files: weights come from a source, or from a model in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llm_kernels import native
from llm_kernels.decoder import Decoder, Family, UnsupportedError, padded, refuse_sizes
from llm_kernels.draws import NativeNumerics
from llm_kernels.objects import load_object, source_digest
from llm_kernels.packed import KINDS, Arithmetic, Format, Rows, own_format
from llm_tools.sources import TensorSource

from ..batch import Batch
from ..config import ConfigError, EngineConfig, cache_folder

FORMATS = {"float32": Format.FLOAT32, "bfloat16": Format.BFLOAT16, "int8": Format.INT8, "int4": Format.INT4}
ARITHMETICS = {"fma32": Arithmetic.FMA32, "q8dot": Arithmetic.Q8DOT, "dpbf16": Arithmetic.DPBF16}


class _SourceTensors:
    """A source's tensors as a Decoder asks for them."""

    def __init__(self, source: TensorSource, family: Family) -> None:
        self._source = source
        self.names = frozenset(source.tensors())
        self._family = family

    def rows(self, name: str) -> Rows:
        raw = self._source.rows(name)
        if self._family.is_transposed(name) and not raw.transposed:
            is_bfloat16 = raw.kind.name == "BF16"
            values = raw.data.view(np.uint16) if is_bfloat16 else self._source.float32(name)
            return Rows.of(np.ascontiguousarray(values.T))
        if raw.kind.number in KINDS:
            return Rows(raw.kind.number, raw.depth, raw.data)
        return Rows.of(self._source.float32(name), unpacked=raw.kind.values > 1)

    def vector(self, name: str) -> NDArray[np.float32] | None:
        return self._source.float32(name) if name in self.names else None


class _ModelTensors:
    """The tensors of a transformers model in memory."""

    def __init__(self, model: Any, family: Family) -> None:
        self._tensors: dict[str, Tensor] = model.state_dict()
        self.names = frozenset(self._tensors)
        self._family = family

    def rows(self, name: str) -> Rows:
        tensor = self._tensors[name].detach()
        if self._family.is_transposed(name):
            tensor = tensor.T.contiguous()
        if tensor.dtype is torch.bfloat16:
            return Rows.of(tensor.view(torch.uint16).numpy())
        return Rows.of(tensor.float().numpy())

    def vector(self, name: str) -> NDArray[np.float32] | None:
        found = self._tensors.get(name)
        return None if found is None else found.detach().float().numpy()


def make_choice(config: EngineConfig, library: Any) -> Callable[[Rows], tuple[Format, Arithmetic]]:
    """What `weight_format`, `arithmetic` and `dtype` make of each weight's rows. ConfigError for what cannot be."""
    asked = config.weight_format if config.weight_format != "auto" else config.dtype
    arithmetic = ARITHMETICS.get(config.arithmetic)
    has_dpbf16 = bool(library.ts_has_dpbf16())
    if arithmetic is Arithmetic.DPBF16 and not has_dpbf16:
        raise ConfigError("arithmetic dpbf16 needs a CPU with avx512_bf16, which this one lacks; choose auto or fma32")

    def choose(rows: Rows) -> tuple[Format, Arithmetic]:
        weight_format = FORMATS[asked] if asked in FORMATS else own_format(library, rows)
        packed = weight_format >= Format.INT8
        if arithmetic is Arithmetic.Q8DOT and not packed:
            if config.weight_format != "auto":
                raise ConfigError(
                    f"arithmetic q8dot needs weight_format int8 or int4, got {asked}; choose one, or fma32"
                )
            weight_format, packed = Format.INT8, True
        if arithmetic is Arithmetic.DPBF16 and weight_format is not Format.BFLOAT16:
            if config.weight_format != "auto":
                raise ConfigError(f"arithmetic dpbf16 needs weight_format bfloat16, got {asked}; choose it, or fma32")
            weight_format, packed = Format.BFLOAT16, False
        if arithmetic is not None:
            return weight_format, arithmetic
        if packed:
            return weight_format, Arithmetic.Q8DOT
        fast = weight_format is Format.BFLOAT16 and has_dpbf16
        return weight_format, Arithmetic.DPBF16 if fast else Arithmetic.FMA32

    return choose


@dataclass(frozen=True, slots=True)
class Plan:
    """A model that the kernels can compute whole, before it is packed."""

    library: Any
    level: str
    family: Family
    tensors: _SourceTensors | _ModelTensors
    choice: Callable[[Rows], tuple[Format, Arithmetic]]
    bfloat16_kv: bool

    @classmethod
    def of(cls, config: EngineConfig, family: Family, model: Any, source: TensorSource | None) -> Plan:
        """Plan for a family. Raises UnsupportedError, NativeUnavailableError and ConfigError."""
        if config.dtype == "float16":
            raise UnsupportedError("whole native steps do not compute in float16")
        refuse_sizes(family)
        library, level = load_object(cache_folder(), os.environ)
        tensors = _ModelTensors(model, family) if source is None else _SourceTensors(source, family)
        choice = make_choice(config, library)
        if (name := f"{family.layers[0].o}.weight") not in tensors.names:
            raise UnsupportedError(f"the native kernels look for {name!r}, which this model does not have")
        first = tensors.rows(name)
        return cls(library, level.name, family, tensors, choice, choice(first)[0] is not Format.FLOAT32)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        family = self.family
        item = 2 if self.bfloat16_kv else 4
        return len(family.layers) * family.kv_heads * (family.dim + padded(family.dim)) * item

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights, but for what fills their last panels."""
        family = self.family
        names = {family.embedding, family.head}
        for layer in family.layers:
            names |= {*layer.qkv, layer.o, layer.gate, layer.up, layer.gate_up, layer.down} - {""}
        rows = [self.tensors.rows(f"{name}.weight") for name in names]
        return int(sum(r.data.shape[0] * r.depth * self.choice(r)[0].bits for r in rows) / 8)

    def steps(self, config: EngineConfig) -> NativeSteps:
        """Pack the weights and allocate the KV cache of a configuration whose sizes are settled."""
        decoder = Decoder(
            self.library,
            self.family,
            self.tensors,
            self.choice,
            slots=config.kv_tokens,
            block_size=config.block_size,
            positions=config.max_context,
            threads=config.threads,
            bfloat16_kv=self.bfloat16_kv,
        )
        numerics = NativeNumerics(self.library, config.threads)
        return NativeSteps(decoder, numerics, config, "bfloat16" if self.bfloat16_kv else "float32")


class NativeSteps:
    """A model in the kernels' form, and what draws of its logits. `kv_dtype` names how keys and values are kept."""

    def __init__(self, decoder: Decoder, numerics: NativeNumerics, config: EngineConfig, kv_dtype: str) -> None:
        self.decoder = decoder
        self.numerics = numerics
        self.kv_dtype = kv_dtype
        self._block_size = config.block_size
        self._blocks = config.kv_tokens // config.block_size
        self._positions = config.max_context

    @property
    def weight_format(self) -> str:
        """The formats of the weights."""
        return "+".join(sorted({f.name.lower() for f, _ in self.decoder.formats}))

    @property
    def arithmetic(self) -> str:
        """The arithmetics that are used."""
        return "+".join(sorted({a.name.lower() for _, a in self.decoder.formats}))

    def name(self) -> str:
        """Name what decides the bits of logits. That of dpbf16 is the processor's own way to add."""
        return f"{self.arithmetic} {source_digest()[:12]}, weights {self.weight_format}, KV {self.kv_dtype}"

    def forward(self, batch: Batch, head_rows: Tensor) -> Tensor:
        """Logits float32 [head rows, vocabulary], after writing all KV. RuntimeError: an index is out of range."""
        table, start, context = native.lay_out(batch.spans)
        tokens, positions, slots = (t.numpy() for t in (batch.token_ids, batch.positions, batch.slot_mapping))
        heads = head_rows.numpy()
        native.check_layout(table, context, slots, self._blocks, self._block_size)
        native.check_range("token_ids", tokens, self.decoder.embedded)
        native.check_range("positions", positions, self._positions)
        native.check_range("head_rows", heads, len(tokens))
        logits = torch.empty(len(heads), self.decoder.vocabulary)
        self.decoder.forward(tokens, positions, slots, start, context, table, heads, logits.numpy())
        return logits


def put_unpacked(model: Any, steps: NativeSteps) -> None:
    """Give a transformers model the values that packed weights stand for, so that both compute the same model."""
    for name, values in steps.decoder.rounded():
        weight = model.get_submodule(name).weight
        turned = values.T if tuple(weight.shape) != values.shape else values
        with torch.no_grad():
            weight.copy_(torch.from_numpy(np.ascontiguousarray(turned)))
