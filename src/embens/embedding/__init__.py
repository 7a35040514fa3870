"""From a reference network to an ensemble: which sites, what is shared, the named families."""
