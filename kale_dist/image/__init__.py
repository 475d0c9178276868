"""Images: what they are made of, how they are made, and where they are found again."""
