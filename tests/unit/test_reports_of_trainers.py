"""Other trainers in ranks, of versions that lack what their progress is told by: they train, and at most a line says what is not shown.

What is told of the real ones is tested in tests/foreign.
"""

import pytest

import kale_dist as kd

LACKING = {
    "no list of callbacks": ("", ""),
    "another kind of list": ("DEFAULT_CALLBACKS = ()", ""),
    "no class of callbacks": ("DEFAULT_CALLBACKS = []", "What transformers.trainer does cannot be shown"),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_a_version_that_lacks_a_name_is_imported_all_the_same(tmp_path, monkeypatch, jobs, lacking):
    source, noted = LACKING[lacking]
    folder = tmp_path / "transformers"
    folder.mkdir()
    for name, text in (("__init__", ""), ("trainer", f"{source}\nLOADED = 5"), ("trainer_callback", "")):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def imports():
        from transformers.trainer import LOADED

        return LOADED

    jobs.append(kd.launch(imports, number_of_processes=2))
    assert jobs[0].results(60) == [5, 5]
    notes = [line.text for line in jobs[0].logs() if "cannot be shown" in line.text]
    assert len(notes) == (2 if noted else 0)
    assert all(note.startswith(noted) for note in notes)


def test_a_function_that_trains_with_no_trainer_has_no_progress(jobs):
    jobs.append(kd.launch(max, 1, 2, number_of_processes=2))
    assert jobs[0].result(60) == 2
    assert [one.progress for one in jobs[0].status.replicas] == [None, None]
