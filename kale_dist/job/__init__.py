"""A job in the notebook: the user's handle, and what waits for it, reads its results and puts its weights in place."""
