"""The training loop that runs in every rank, and its parts. Worker side."""
