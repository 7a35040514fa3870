#!/bin/bash
# A job array without Ray: every task runs the same command on a common folder and takes the cells
# that no other has. Submit with: sbatch array.sh transition
#SBATCH --job-name=embens
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --gres=gpu:1
#SBATCH --time=24:00:00
#SBATCH --requeue

set -euo pipefail
experiment=${1:-transition}
: "${EMBENS_DATA:?set EMBENS_DATA to the folder with train.bin and test.bin}"
: "${EMBENS_OUT:=$PWD/embens-results}"   # common to all tasks; must support flock

# Four processes share the GPU of a task.
srun embens reproduce "$experiment" --preset paper \
    --data "$EMBENS_DATA" --out "$EMBENS_OUT" --workers "${SLURM_CPUS_PER_TASK:-4}"
