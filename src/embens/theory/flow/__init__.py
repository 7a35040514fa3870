"""Training in the limit: squared loss in closed form, cross-entropy by integration."""
