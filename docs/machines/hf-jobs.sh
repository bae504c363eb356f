#!/bin/sh
# One machine of Hugging Face Jobs, from a checkout of kdcli. The bucket keeps the run; a further
# attempt goes on.
exec hf jobs run --flavor a100x8 --timeout 12h --attempts 5 --secrets HF_TOKEN \
  --volume hf://buckets/me/tokens:/tokens:ro --volume hf://buckets/me/runs:/runs --volume .:/kdcli \
  pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime \
  sh -c 'pip install /kdcli && kdcli distill bert-base-uncased --recipe minilm-6x768 \
    --data /tokens -o /runs/6x768 --resume'
