#!/bin/sh
# On every machine at once: FIRST=address-of-one-of-them NODES=2 GPUS=8 sh torchrun.sh
exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" \
  --rdzv-backend c10d --rdzv-id 6x768 --rdzv-endpoint "$FIRST:29500" --max-restarts 0 \
  -m kdcli distill bert-base-uncased --recipe minilm-6x768 --data /shared/tokens \
  -o /shared/runs/6x768 --resume
