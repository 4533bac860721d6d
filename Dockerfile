# docker build -t smp .
# For GPUs: docker build -t smp --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# The wheels of that index bring CUDA and NCCL. Where a network needs more, such as EFA's plugin for NCCL, give an image
# that has it, with Python 3.11 or newer: --build-arg BASE=...
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# A C compiler for smp's kernel, a C++ compiler for `smp plan`, ssh for `smp launch hostfile`.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/smp

# Dependencies first: they change less often than the code.
COPY constraints.txt ./
RUN python3 -m pip install --no-cache-dir --constraint constraints.txt --index-url "${TORCH_INDEX}" \
    --extra-index-url https://pypi.org/simple "torch==${TORCH}"

COPY . .
RUN python3 -m pip install --no-cache-dir --constraint constraints.txt --editable '.[plots,tensorboard]' \
    && python3 -c 'import smp, smp.launch.local'

ENV PYTHONUNBUFFERED=1

CMD ["python3", "-m", "smp.launch.local", "--nproc_per_node", "2", "-m", "smp.train", "--config", "configs/demo.yaml"]
