"""What kale_dist shows in notebooks, and the execution of whole notebooks from the command line."""
