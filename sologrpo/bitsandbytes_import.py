"""Import bitsandbytes without torch's compiler, which takes a second; import this before PEFT.

PEFT imports bitsandbytes, which wraps functions in `torch.compile` when it is imported (0.50,
backends/default/ops.py:19). None of them runs here: CPUs and CUDA devices have other kernels.
"""

import os
from contextlib import suppress

if "TORCHDYNAMO_DISABLE" not in os.environ:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch/_dynamo/eval_frame.py:1752; read at each call
    try:
        with suppress(ImportError):  # `--help` goes without it
            import bitsandbytes  # noqa: F401
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
