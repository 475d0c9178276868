"""A rank's share of the data: sharding, and what stands in for the user's loaders."""
