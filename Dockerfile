# One image for docker, Apptainer, Enroot and Kubernetes (docs/containers.md). The torch of the package index runs on
# NVIDIA GPUs and on CPUs; the driver is the machine's.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# g++: compiled training on CPUs, and Triton. git: a run records the commit of the folder that it starts in.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ git \
    && rm -rf /var/lib/apt/lists/*

# Of an image that has a torch, such as nvcr.io/nvidia/pytorch, the torch is kept by TORCH= with its version.
ARG TORCH=
ARG EXTRAS=s3,wandb
WORKDIR /opt/shardwise
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python3 -m venv --system-site-packages /opt/venv \
    && sed "s/^torch==.*/torch==${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}/" constraints.txt > /tmp/constraints.txt \
    && PIP_CONSTRAINT=/tmp/constraints.txt /opt/venv/bin/pip install --no-cache-dir ".[${EXTRAS}]" \
    && rm -r /tmp/constraints.txt build

# Runs and prepared data are in the folder that is mounted, as any user.
ENV PATH=/opt/venv/bin:${PATH} \
    SHARDWISE_CACHE=/train/.cache/shardwise
WORKDIR /train
CMD ["shardwise", "--help"]
