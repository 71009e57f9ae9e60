"""The methods by name."""

METHODS = ("fedmix", "fedavg", "biased-fedavg", "local-global", "independent")
