#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8
#SBATCH --time=04:00:00 --signal=TERM@120 --requeue

# Submit with `sbatch slurm.sh`. Two minutes before the time is over the run leaves a checkpoint and
# exits with 75.
srun kdcli distill bert-base-uncased --recipe minilm-6x768 --data /shared/tokens \
  -o /shared/runs/6x768 --resume
code=$?
test "$code" -ne 75 || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
