"""The first and the last layer of a network."""

from torch import nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def first_layer(network: nn.Module) -> str:
    """Return the name of the first Linear or Conv layer, in order of registration.

    Args:
        network: Network with at least two such layers.

    Example:
        >>> first_layer(nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        '1'
    """
    return _layer_names(network)[0]


def last_layer(network: nn.Module) -> str:
    """Return the name of the last Linear or Conv layer, in order of registration.

    Args:
        network: Network with at least two such layers.

    Example:
        >>> last_layer(nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        '3'
    """
    return _layer_names(network)[-1]


def _layer_names(network: nn.Module) -> list[str]:
    names = [name for name, module in network.named_modules() if isinstance(module, LAYERS)]
    if len(names) < 2:
        raise ValueError(
            f"the network must have at least two Linear or Conv layers, got {len(names)}."
        )
    return names
