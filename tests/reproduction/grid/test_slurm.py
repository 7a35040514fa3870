"""The scripts for SLURM, with stand-ins for its commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "docs" / "how-to" / "slurm"
COMMANDS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do [ "$1" = -w ] && shift; shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo node; else echo "$@" >> "$MARKS/requeued"; fi',
    "ray": "exit 0",
    "python": 'echo "$@" >> "$MARKS/arguments"; [ -z "${WAITS:-}" ] || exec sleep 60',
}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a script, and the folder of what its commands write."""
    for name, body in COMMANDS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def start(script, *arguments, **variables):
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "MARKS": str(tmp_path),
            "EMBENS_DATA": "/data",
            "EMBENS_OUT": "/out",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_CPUS_PER_TASK": "4",
            "SLURM_JOB_NODELIST": "node",
            **variables,
        }
        command = ["bash", str(SCRIPTS / script), *arguments]
        # A new session, so that all its processes can be ended together.
        return subprocess.Popen(command, env=environment, start_new_session=True)

    return start


def test_each_task_of_an_array_runs_one_experiment(start, tmp_path):
    variables = {"SLURM_ARRAY_TASK_ID": "1", "EMBENS_PRESET": "paper"}
    assert start("array.sh", "transition", "widths", **variables).wait(60) == 0
    arguments = (tmp_path / "arguments").read_text().strip()
    assert arguments == "-m reproduction widths --preset paper --data /data --out /out"


@pytest.mark.parametrize("script", ["array.sh", "ray.sh"])
def test_a_job_requeues_itself_before_its_time_limit(script, start, tmp_path):
    job = start(script, "transition", WAITS="1")
    end = time.monotonic() + 60
    while not (tmp_path / "arguments").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) != 0  # the batch system does not take the job for finished
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    os.killpg(job.pid, signal.SIGKILL)
