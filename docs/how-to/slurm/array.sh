#!/bin/bash
# A job array without Ray: task k runs the k-th experiment of the arguments.
# Submit with: sbatch --array=0-2 array.sh transition widths lld
#SBATCH --job-name=embens
#SBATCH --array=0-0
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --gres=gpu:1
#SBATCH --time=24:00:00
#SBATCH --requeue

set -euo pipefail
experiments=("${@:-transition}")
: "${EMBENS_DATA:?set EMBENS_DATA to the folder with train.bin and test.bin}"
: "${EMBENS_OUT:=$PWD/embens-results}"   # common to all tasks; must support flock

# Four processes share the GPU of a task.
srun python -m reproduction "${experiments[${SLURM_ARRAY_TASK_ID:-0}]}" --preset paper \
    --data "$EMBENS_DATA" --out "$EMBENS_OUT" --workers "${SLURM_CPUS_PER_TASK:-4}"
