"""A rank at a breakpoint, debugged from here, for tests in containers and in pods."""

import kale_dist as kd


def stops_on_1(value):
    here = kd.context()
    if here.rank == 1:
        breakpoint()
        value += 1
    return value


def check_debugging(monkeypatch, **options):
    """Debug rank 1 of two where its job is waited for: a value is looked at and changed."""
    # Containers get this module, too, and have no part of the library for notebooks.
    from kale_dist.job import interrupts

    lines, asked = ["p value", "value = 40", "c"], []
    monkeypatch.setattr(interrupts, "has_person", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: (asked.append(prompt), lines.pop(0))[1])
    job = kd.launch(stops_on_1, 2, number_of_processes=2, **options)
    assert job.results() == [2, 41]
    assert asked == ["(rank 1) "] * 3
    job.delete()
