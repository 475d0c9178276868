"""The Docker engine: how it is reached, and what its errors mean."""
