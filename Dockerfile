# docker build --tag accelerate-template .
# docker run --volume "$PWD/runs:/app/runs" accelerate-template [make train ARGS=--seed=1]
# On GPUs: docker run --gpus all --ipc=host … accelerate-template .venv/bin/accelerate launch …
ARG BASE=python:3.12-slim
FROM $BASE AS base
# g++: torch.compile on a CPU needs it
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 user && install --directory --owner=user /app /app/runs
USER user
WORKDIR /app

FROM base
# before the code: a change of the code does not install all of it again
COPY --chown=user Makefile requirements.txt requirements-dev.txt ./
RUN PIP_NO_CACHE_DIR=1 make setup
COPY --chown=user . .
CMD ["make", "train"]
