"""MoE: experts in A8W8, A8W4 or MXFP8, all other matrices in W8A8 with a scale per row, or as experts are.

A ladder has the formats of golden/gptq.py in all matrices, and activations in groups.

`MoE` runs an exported file. Its experts are those of golden/grouped.py: what the fused operator computes for rows
sorted by expert, the forward pass here computes step by step, so that a trace has what lies between.
"""

from pathlib import Path

import numpy as np

from formats.gptq import check_masks
from formats.low_bits import unpack_codes
from formats.model_file import map_tensors, read_header
from formats.moe import LADDER, MoeLayout, expert_shapes, router_shapes, stored_tensors
from formats.schemes import MOE_FILE
from formats.tensors import matrix_shapes, norm_shapes
from golden.forward import F32, Step, ignore
from golden.gptq import expand_parts
from golden.grouped import Experts, Int4Experts, Int8Experts, expert_matmul, expert_sums, scaled_sums
from golden.mx import MX, dequantize_mx, quantize_mx
from golden.q8 import Int8Scheme, Quantized, dequantize, has_accumulators, quantize, recorded, rows_of
from golden.routing import by_expert


class MoE(Int8Scheme):
    """The scheme of runq_moe.cpp, from a file that export/moe.py wrote (mapped, not read).

    Raises ModelError if the file is no MoE file.
    """

    def __init__(self, path: Path | str):
        path = Path(path)
        head = read_header(path, MOE_FILE)
        assert isinstance(head.layout, MoeLayout)
        self.config, self.layout = head.config, head.layout
        c = self.config
        found = map_tensors(path, head)
        self._vectors = {name: found[name] for name, _ in (*norm_shapes(c), *router_shapes(c))}
        self.group_size = self.layout.activation_group
        stored = dict(expert_shapes(c)) | (dict(matrix_shapes(c)) if self.layout.is_uniform else {})
        self._experts = {
            name: {part.name.rpartition(".")[2]: found[part.name] for part in stored_tensors(name, shape, self.layout)}
            for name, shape in stored.items()
        }
        check_masks(path, found)
        self._matrices: dict[str, Quantized] = {}
        for name, _ in matrix_shapes(c):
            if self.layout.is_uniform:  # as if there were one expert
                self._experts[name] = {part: values[None] for part, values in self._experts[name].items()}
            else:
                self._matrices[name] = Quantized(found[f"{name}.codes"], found[f"{name}.scales"])
        if c.tied:
            known = self._experts if self.layout.is_uniform else self._matrices
            known["classifier"] = known["embed"]

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name]

    def matrix(self, name: str) -> Quantized:
        """The int8 matrix of a step that no expert does, codes (n_out, n_in); pure files and ladders have none."""
        return self._matrices[name]

    def quantized(self, _name: str, x: np.ndarray) -> Quantized:
        return quantize(x, self.group_size or x.shape[-1])

    def experts(self, name: str, chosen: slice = slice(None)) -> Experts:
        """The matrices of a step's experts, all or some, as the operator takes them; of a uniform file any matrix."""
        return self._as_experts(name, {part: values[chosen] for part, values in self._experts[name].items()})

    def _as_experts(self, name: str, parts: dict[str, np.ndarray]) -> Experts:
        if self.layout.format == LADDER:
            return expand_parts(parts, self.layout.of(name), self.group_size)
        codes, scales, *assist = parts.values()
        if self.layout.format == "a8w8":
            return Int8Experts(codes, scales)
        if self.layout.format == "mxfp8":
            return MX(codes, scales)
        e, n_out, n_bytes = codes.shape
        unpacked = unpack_codes(codes.reshape(e * n_out, n_bytes), 4).astype(np.int8) - np.int8(8)
        return Int4Experts(unpacked.reshape(e, n_out, -1), scales.astype(F32).reshape(e, n_out, -1), *assist)

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        if not self.layout.is_uniform:
            return super().embedding(tokens)
        parts = self._experts["embed"].items()
        rows = {part: values if part == "table" else values[:, tokens] for part, values in parts}
        table = self._as_experts("embed", rows)
        if isinstance(table, MX):
            return dequantize_mx(table)[0].astype(F32)
        return dequantize(Quantized(table.codes[0], table.scales[0].reshape(len(tokens), -1)))

    def activation(self, step: Step, name: str, x: np.ndarray) -> Quantized | MX:
        return self.expert_activation(step, name, x) if self.layout.is_uniform else super().activation(step, name, x)

    def linear(self, x: Quantized | MX, name: str, step: Step = ignore) -> np.ndarray:
        if not self.layout.is_uniform:
            return super().linear(x, name, step)
        weight = self.experts(name)
        if isinstance(x, MX) or not has_accumulators(name, step):
            return expert_matmul(x, weight, 0)
        return scaled_sums(step(name + ".acc", expert_sums(x, weight, 0)), x, weight, 0)

    def expert_activation(self, step: Step, name: str, x: np.ndarray) -> Quantized | MX:
        rows = x.reshape(-1, x.shape[-1])
        found = quantize_mx(rows, self.layout.group) if self.layout.format == "mxfp8" else self.quantized(name, rows)
        scales = found.scales.reshape(*x.shape[:-1], -1)
        found = recorded(step, name, found._replace(codes=found.codes.reshape(x.shape), scales=scales))
        return found._replace(codes=found.codes.reshape(rows.shape), scales=found.scales.reshape(len(rows), -1))

    def expert_linear(
        self, x: Quantized | MX, rows: np.ndarray, experts: np.ndarray, name: str, step: Step = ignore
    ) -> np.ndarray:
        def one(expert: int) -> Experts:
            return self.experts(name, slice(expert, expert + 1))

        if isinstance(x, MX) or not has_accumulators(name, step):
            return by_expert(rows, experts, lambda chosen, e: expert_matmul(rows_of(x, chosen), one(e), 0))
        sums = by_expert(rows, experts, lambda chosen, e: expert_sums(rows_of(x, chosen), one(e), 0))
        sums = step(name + ".acc", sums)  # (n, k, n_out, groups)
        flat, pairs = sums.reshape(-1, *sums.shape[2:]), np.arange(rows.size).reshape(rows.shape)
        return by_expert(
            pairs, experts, lambda chosen, e: scaled_sums(flat[chosen], rows_of(x, rows.flat[chosen]), one(e), 0)
        )
