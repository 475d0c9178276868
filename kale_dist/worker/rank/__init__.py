"""The process of a rank: from the fork server to the user's function."""
