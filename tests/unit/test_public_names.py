import inspect
import pathlib
import subprocess
import sys

import kale_dist

VERBS = {"distribute", "launch", "render", "attach", "jobs", "report", "context"}


def test_every_public_name_is_there_and_listed():
    for name in kale_dist.__all__:
        assert getattr(kale_dist, name) is not None
    assert sorted(kale_dist.__all__) == kale_dist.__all__
    assert set(kale_dist.__all__) <= set(dir(kale_dist))
    assert set(kale_dist._HOMES) == set(kale_dist.__all__) - {"__version__"}
    # Besides the two modules that hold more.
    assert len(set(kale_dist.__all__) - {"__version__", "callbacks", "strategies"}) <= 26
    assert set(kale_dist.__all__) >= VERBS


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(kale_dist, "distrbute")


def test_no_module_at_the_root_has_the_name_of_a_verb():
    root = pathlib.Path(kale_dist.__file__).parent
    assert not VERBS & {path.stem for path in root.iterdir()}


def public_objects():
    """Each public class and function by its name, those of the public modules too, and the methods of the classes."""
    named = {name: getattr(kale_dist, name) for name in kale_dist.__all__ if name != "__version__"}
    for module in filter(inspect.ismodule, list(named.values())):
        named |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    for name, one in named.items():
        yield name, one
        for key, member in vars(one).items() if inspect.isclass(one) else ():
            if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property | classmethod)):
                yield f"{name}.{key}", member


def test_every_class_and_function_has_a_docstring_of_its_own():
    # A dataclass without one gets its signature.
    without = [
        name
        for name, one in public_objects()
        if not (text := inspect.getdoc(one)) or (inspect.isclass(one) and text.startswith(f"{one.__name__}("))
    ]
    assert not without


def test_the_import_is_light_and_loads_what_is_used():
    code = (
        "import sys, kale_dist; heavy = {'torch', 'numpy', 'IPython', 'cloudpickle'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
        "assert [m for m in sys.modules if m.startswith('kale_dist')] == ['kale_dist']\n"
        "kale_dist.context(); kale_dist.report(loss=1); kale_dist.attach, kale_dist.Job\n"
        "assert 'torch' not in sys.modules and 'IPython' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
