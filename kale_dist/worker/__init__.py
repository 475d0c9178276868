"""The worker side: the agent that starts and watches ranks, and what runs in a rank around the user's function."""
