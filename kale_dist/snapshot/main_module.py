"""multiprocessing runs this module in a child that a rank spawned, in place of the notebook, which is not a file.

Its globals become the child's `__main__`, so it defines nothing but what the snapshot brings.
"""

if __name__ == "__mp_main__":
    from kale_dist.snapshot import loading as _loading

    _loading.fill_spawned(globals())
