#!/bin/bash
# A job array without Ray: task k runs the k-th experiment of the arguments, on all GPUs of the task.
# Submit with: sbatch --array=0-2 array.sh transition widths lld
#
# Cells save their state after each epoch. Two minutes before the time limit the task requeues itself,
# and continues from there: the limit has to be longer than one epoch of the largest ensemble (about a
# minute at M=40 on an A100), not longer than a cell.
#SBATCH --job-name=embens
#SBATCH --array=0-0
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --gres=gpu:1
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
experiments=("${@:-transition}")
: "${EMBENS_DATA:?set EMBENS_DATA to the folder with train.bin and test.bin}"
: "${EMBENS_OUT:=$PWD/embens-results}"   # common to all tasks; must support flock
: "${EMBENS_PRESET:=gpu}"                # or paper

trap 'scontrol requeue "$SLURM_JOB_ID"' USR1

# One worker per GPU by default.
srun python -m reproduction "${experiments[${SLURM_ARRAY_TASK_ID:-0}]}" --preset "$EMBENS_PRESET" \
    --data "$EMBENS_DATA" --out "$EMBENS_OUT" &
wait $!
