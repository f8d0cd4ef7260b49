"""The numpy reference: what every program of this repository has to compute, one line an operation.

Each operation takes fp32, computes in fp64 and rounds its result to fp32 once. That makes the reference the
correctly rounded answer rather than one more order of summation, and the same on every machine.

    python -m golden make            write the golden vectors to golden/data (`make golden` exports the models first)
    python -m golden diff A B        compare two traces step by step
    python -m golden ppl HF_DIR TEXT perplexity of a text, in fp32, Q8, W8A8 or AWQ
"""

from formats.interpreter import check

check("golden")
