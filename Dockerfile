# SoloGRPO on a CUDA GPU (docs/colab.md#docker). Never built, and never run.

# torch's wheel brings the libraries of CUDA 13.0. The image adds what the NVIDIA container toolkit
# needs to pass the GPU on, and a driver of 580 or newer has to be on the host.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# Triton compiles a launcher per kernel, with gcc and Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY LICENSE README.md constraints.txt ds_zero2.json evaluate.py pyproject.toml train.py ./
COPY configs configs
COPY quickstart quickstart
COPY rewards rewards
COPY sologrpo sologrpo
ENV PATH=/opt/venv/bin:$PATH
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/venv && pip install -c constraints.txt .

# Models, data and compiled kernels are kept in /cache, runs in /work. New volumes get their owner.
RUN useradd --create-home sologrpo && install -d -o sologrpo -g sologrpo /cache /work
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
VOLUME ["/cache", "/work"]
USER sologrpo
WORKDIR /work
ENTRYPOINT ["sologrpo"]
CMD ["--help"]
