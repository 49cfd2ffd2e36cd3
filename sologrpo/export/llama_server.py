"""Serve one GGUF file with llama.cpp over HTTP, on this machine alone, until stdin is closed.

`export.llama` runs this script. It imports nothing of this project, so it starts at once.
"""

import os
import secrets
import sys

import xllamacpp


def main() -> None:
    """Load the file; print the server's address and its key."""
    file, context, threads = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.check_tensors = True  # for NaN and infinity
    params.n_ctx = int(context)
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    key = secrets.token_hex()
    params.api_keys = [key]
    server = xllamacpp.Server(params)
    print(server.listening_address, key, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
