"""The live display of a job in a notebook, and its widget."""
