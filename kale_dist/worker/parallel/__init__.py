"""How ranks share the training, one strategy a file."""
