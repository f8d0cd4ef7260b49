"""Writes tests/hf/compressed_tensors.json: how the package compressed-tensors itself describes W8A8 in config.json.

    python -m tests.compressed_tensors_fixture

Needs torch and compressed-tensors. `dynamic` is its preset "W8A8" for all linear layers but lm_head, `static` the same
with one scale per tensor of activations, as QuantizationConfig turns them into JSON, with every field there is.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from formats.interpreter import need

if __name__ == "__main__":
    need("torch", "compressed_tensors")

OUT = Path(__file__).parent / "hf" / "compressed_tensors.json"


def main() -> int:
    """See the module's docstring."""
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        QuantizationStrategy,
        preset_name_to_scheme,
    )

    def described(static: bool) -> dict:
        scheme = preset_name_to_scheme("W8A8", ["Linear"])
        if static:
            one_scale = {"strategy": QuantizationStrategy.TENSOR, "dynamic": False, "observer": "minmax"}
            scheme.input_activations = scheme.input_activations.model_copy(update=one_scale)
        config = QuantizationConfig(
            config_groups={"group_0": scheme},
            format=CompressionFormat.int_quantized.value,
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=["lm_head"],
        )
        return json.loads(config.model_dump_json())

    known = {
        "compressed-tensors": version("compressed-tensors"),
        "dynamic": described(False),
        "static": described(True),
    }
    OUT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
