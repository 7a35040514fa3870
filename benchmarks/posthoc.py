"""Improve the probabilities of a trained network afterwards, in seconds.

Noisy digits of scikit-learn, one perceptron that was trained for too long, three seeds. Rows: the
network, the network with a temperature, eight last layers on cached features, and the last-layer
Laplace approximation of laplace-torch, if it is installed.

Run ``python benchmarks/posthoc.py``.
"""

import time
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import embens
from embens import metrics, training

MEMBERS = 8
SEEDS = 3
Data = tuple[Tensor, Tensor]
Probabilities = Callable[[nn.Module, Data, Data, Tensor], Tensor]


def split(seed: int) -> tuple[Data, Data, Data]:
    """Return 700 training rows, 200 validation rows and the other rows."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    x = x + 0.35 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, validation, test = order[:700], order[700:900], order[900:]
    return (x[train], y[train]), (x[validation], y[validation]), (x[test], y[test])


def train_network(seed: int, train: Data) -> nn.Module:
    """Return a perceptron that was trained for 40 epochs."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    single = embens.independent(nn.Sequential(*layers), 1)
    embens.fit(single, train, epochs=40, lr=0.05, batch_size=64, seed=seed, progress=False)
    return single.member(0).eval()


def network_alone(network: nn.Module, train: Data, validation: Data, x: Tensor) -> Tensor:
    return network(x).softmax(-1)


def temperature(network: nn.Module, train: Data, validation: Data, x: Tensor) -> Tensor:
    prediction = embens.Prediction(network(validation[0])[None])
    scale = prediction.temperature(validation[1])
    return (network(x) / scale).softmax(-1)


def last_layers(network: nn.Module, train: Data, validation: Data, x: Tensor) -> Tensor:
    ensemble = embens.adapt(network, MEMBERS, by="head")
    callbacks = [training.CacheFeatures(), training.KeepBest("nll")]
    options = {"epochs": 20, "lr": 0.005, "batch_size": 64, "progress": False}
    embens.fit(ensemble, train, validation, callbacks=callbacks, **options)
    return embens.predict(ensemble, x).probabilities


def laplace(network: nn.Module, train: Data, validation: Data, x: Tensor) -> Tensor:
    from laplace import Laplace

    options = {"subset_of_weights": "last_layer", "hessian_structure": "kron"}
    with torch.enable_grad():
        model = Laplace(network, "classification", **options)
        model.fit(DataLoader(TensorDataset(*train), 64))
        model.optimize_prior_precision(method="marglik")
    return model(x, link_approx="probit").detach()


SYSTEMS: dict[str, Probabilities] = {
    "network": network_alone,
    "network, temperature": temperature,
    f"{MEMBERS} last layers on cached features": last_layers,
    "last-layer Laplace": laplace,
}


def measure(name: str) -> tuple[list[float], list[float], float]:
    """Return log losses and accuracies by seed, and the CPU seconds of the fastest run."""
    losses, accuracies, seconds = [], [], []
    for seed in range(SEEDS):
        train, validation, (x, y) = split(seed)
        network = train_network(seed, train)
        start = time.process_time()
        with torch.no_grad():
            probabilities = SYSTEMS[name](network, train, validation, x)
        seconds.append(time.process_time() - start)
        outputs = probabilities.log()[None]
        losses.append(float(metrics.nll(outputs, y)))
        accuracies.append(float(metrics.ensemble_accuracy(outputs, y)))
    return losses, accuracies, min(seconds)


def main() -> None:
    torch.set_num_threads(1)
    print("| | log loss by seed | accuracy by seed | CPU seconds |")
    print("|---|---|---|---|")
    for name in SYSTEMS:
        try:
            losses, accuracies, seconds = measure(name)
        except ModuleNotFoundError as error:
            print(f"| {name} | not measured: {error} | | |")
            continue
        loss_text = ", ".join(f"{loss:.3f}" for loss in losses)
        accuracy_text = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)
        print(f"| {name} | {loss_text} | {accuracy_text} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
