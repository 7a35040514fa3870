"""From a module to its limit: what travels through the network, and the rules of its parts."""
