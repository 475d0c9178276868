"""What a job is, as frozen values that check themselves: where it runs, its image, resources and volumes, and the whole of it. Pure."""
