"""Test the built distributions: `make dist` builds a wheel and an sdist, and this installs both.

For each extra alone, and for none, the wheel is installed into a clean environment with the
versions of constraints.txt, and the smallest example of that extra runs. The wheel must contain the
package embens only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = "embens.embed(embens.networks.mlp(4, 8, 2, 1)), x)"
BASE = """
import torch, embens
net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
ensemble = embens.batch_ensemble(net, members=4)
x, y = torch.randn(32, 4), torch.arange(32) % 3
embens.fit(ensemble, (x, y), epochs=1, progress=False)
assert embens.predict(ensemble, x).probabilities.shape == (32, 3)
assert embens.__version__
"""
EXTRAS = {
    "": "",
    "plot": "import matplotlib",
    "theory": f"assert embens.theory.kernels({LIMIT}",
    "onnx": "ensemble.to_onnx('e.onnx', x)",
    "tabular": "from embens.tabular import EmbeddedEnsembleClassifier as E\n"
    "E(max_epochs=2, members=2).fit(x.numpy(), y.numpy()).predict(x.numpy())",
    "reproduction": "import matplotlib, pandas, plotly, rich, scipy, sklearn",
    "ray": "import ray",
}


def main(folder: Path) -> None:
    """Install the wheel with each extra, and the sdist, and run the examples."""
    wheel, sdist = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    check_contents(wheel)
    for extra, program in EXTRAS.items():
        with tempfile.TemporaryDirectory() as place:
            python = environment(Path(place), f"{wheel}[{extra}]" if extra else str(wheel))
            subprocess.run([python, "-c", BASE + program], check=True, cwd=place)
        print(f"ok: embens[{extra}]", flush=True)
    with tempfile.TemporaryDirectory() as place:
        python = environment(Path(place), str(sdist))
        subprocess.run([python, "-c", BASE], check=True, cwd=place)
    print(f"ok: {sdist.name}\n{len(EXTRAS) + 1} passed, 0 failed")


def check_contents(wheel: Path) -> None:
    """Raise if the wheel contains more than the package embens and its metadata."""
    folders = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {folder for folder in folders if not folder.endswith(".dist-info")}
    if packages != {"embens"}:
        raise SystemExit(f"the wheel must contain embens only, got {sorted(packages)}.")


def environment(place: Path, requirement: str) -> str:
    """Create an environment with one requirement and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    python = str(place / "venv" / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*command, "torch", *constraints], check=True)
    subprocess.run([*command, requirement, *constraints], check=True)
    return python


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
