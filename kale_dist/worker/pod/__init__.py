"""What an agent does in a pod or container: its input, the head, and relays to it."""
