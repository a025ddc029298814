# docker build --tag trainer .
# docker run --volume "$PWD/runs:/app/runs" trainer [make train ARGS=--seed=1]
# If runs/ is not of user 1000: --user "$(id -u)" --env HOME=/tmp. On GPUs: --gpus all --ipc=host, and another command,
# such as .venv/bin/accelerate launch --config_file accelerate_configs/ddp.yaml train.py.
# the digest, of August 2026, stands for the images of all processors; dependabot raises it
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS base
# g++: torch.compile on a CPU needs it
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 user && install --directory --owner=user /app /app/runs
USER 1000
WORKDIR /app

FROM base
# before the code: a change of the code does not install all of it again
COPY --chown=user Makefile pyproject.toml requirements.txt requirements-dev.txt ./
RUN PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 make setup
COPY --chown=user . .
CMD ["make", "train"]
