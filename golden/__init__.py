"""The numpy reference: what every program of this repository has to compute, one line an operation.

Each operation is the contract's (docs/numerics.md), to the bit: the programs give the same numbers.

    python -m golden make            write the golden vectors to golden/data (`make golden` exports the models first)
    python -m golden diff A B        compare two traces step by step
    python -m golden ppl HF_DIR TEXT perplexity of a text, in fp32, Q8, W8A8 or AWQ
"""

from formats.interpreter import check

check("golden")
