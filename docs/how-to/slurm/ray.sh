#!/bin/bash
# One job of several nodes with a Ray cluster inside. Submit with: sbatch ray.sh transition
#
# Two minutes before the time limit the job requeues itself. With EMBENS_OUT on a disk that all nodes
# share, unfinished cells continue from their last epoch; otherwise they start again.
#SBATCH --job-name=embens-ray
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:4
#SBATCH --time=48:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
experiment=${1:-transition}
: "${EMBENS_DATA:?set EMBENS_DATA to the folder with train.bin and test.bin, on every node}"
: "${EMBENS_OUT:=$PWD/embens-results}"
port=6379

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address="$head:$port"

cleanup() { srun --overlap --nodes="$SLURM_JOB_NUM_NODES" ray stop --force >/dev/null 2>&1 || true; }
trap cleanup EXIT
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1

srun --overlap --nodes=1 --ntasks=1 -w "$head" \
    ray start --head --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
until srun --overlap --nodes=1 --ntasks=1 -w "$head" ray status >/dev/null 2>&1; do sleep 2; done

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" \
        ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
fi

srun --overlap --nodes=1 --ntasks=1 -w "$head" \
    python -m reproduction "$experiment" --preset "${EMBENS_PRESET:-gpu}" --data "$EMBENS_DATA" --out "$EMBENS_OUT" \
    --engine ray --address auto --gpus-per-cell 1 &
wait $!  # a trap runs during wait, not while a command runs in the foreground
