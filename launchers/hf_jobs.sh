#!/bin/bash
# Train on a machine of Hugging Face (Jobs). The files that git tracks here go there through a bucket of yours, which
# gets the checkpoints and the results. The same command again resumes the run. docs/machines.md says what is untested.
#
#   hf auth login
#   BUCKET=me/runs FLAVOR=a100x4 TIMEOUT=12h bash launchers/hf_jobs.sh --config configs/mnist.yaml
#
# `hf jobs hardware` lists flavors and prices. YAML is accelerate_configs/ddp.yaml unless you set it.
set -euo pipefail
[ -f train.py ] || { echo "hf_jobs.sh: run it in the folder of train.py, not in $PWD" >&2; exit 2; }
[ "${BUCKET:-}" ] || { echo "hf_jobs.sh: set BUCKET, such as BUCKET=me/runs; it is created if it isn't there" >&2; exit 2; }
PATH="$PWD/.venv/bin:$PATH"

# a mistake in the settings costs nothing here
python - "$@" <<'PYTHON'
import sys
from src.distributed.process import exit_codes
from src.start import run_settings

with exit_codes("hf_jobs.sh"):
    run_settings(sys.argv[1:])
PYTHON

hf buckets create "$BUCKET" --private --exist-ok
code="code/$(date +%s).tar.gz" packed="$(mktemp)"
git ls-files -z | tar --null --files-from=- --create --gzip --file="$packed"
hf buckets cp "$packed" "hf://buckets/$BUCKET/$code"
rm "$packed"

# $1: the code; then the settings. What is in runs/ ends with the machine, so the log and the model are copied.
exec hf jobs run --flavor "${FLAVOR:-a10g-small}" --timeout "${TIMEOUT:-4h}" --env PYTHONUNBUFFERED=1 \
    --env YAML="${YAML:-accelerate_configs/ddp.yaml}" --secrets HF_TOKEN ${WANDB_API_KEY:+--secrets WANDB_API_KEY} \
    --volume "hf://buckets/$BUCKET:/bucket" ghcr.io/astral-sh/uv:python3.12-bookworm bash -c '
    mkdir /app && cd /app && tar -xzf "/bucket/$1" && shift && uv sync --quiet --all-extras || exit
    gpus=$(.venv/bin/python -c "import torch; print(torch.cuda.device_count() or 1)")
    .venv/bin/accelerate launch --config_file "$YAML" --num_processes "$gpus" train.py \
        --checkpoint.mirror=/bucket/checkpoints "$@"
    code=$?
    mkdir -p /bucket/runs && tar -C runs --exclude=checkpoints -c . | tar -C /bucket/runs -xm --no-same-owner
    exit $code' train "$code" "$@"
