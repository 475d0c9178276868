"""What tests of builds in the Docker engine are made of: a played pip, wheels, an index."""

import contextlib
import http.server
import ipaddress
import itertools
import threading
import zipfile

PLAYED = r"""#!/bin/sh
[ "$3" = install ] || exit 0
for argument; do case $argument in --requirement=*) name=$(cat "${argument#*=}");; esac; done
case $name in
  sleeps-*) echo "asleep as $0"; exec sleep "${name#sleeps-}";;
  fills-the-disk) echo x > /dev/full || { echo "write error: No space left on device" >&2; exit 1; };;
  cannot-resolve) echo "Failed to resolve 'pypi.org' ([Errno -3] Temporary failure in name resolution)"; exit 1;;
  compiles) echo "error: command 'gcc' failed: No such file or directory" >&2; exit 1;;
esac
"""


def make_wheel(folder, name, version, *requires):
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        metadata = [
            f"Name: {name.replace('_', '-')}",
            f"Version: {version}",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\n" + "\n".join(metadata) + "\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@contextlib.contextmanager
def serving(folder, address, seen):
    """Serve a folder over HTTP; gives the port. `seen` gets path and credentials of each request."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=folder)

        def do_GET(self):
            seen.append((self.path, self.headers.get("Authorization", "")))
            super().do_GET()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer((address, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def gateway_of(engine):
    """This machine's address on the engine's own network; an engine that has just started does not list it."""
    [config] = engine.client.networks.get("bridge").attrs["IPAM"]["Config"]
    return config.get("Gateway") or str(ipaddress.ip_network(config["Subnet"])[1])


def _generations(engine, name):
    """Images that bear a name or are labelled with it, then those that were built on them, and so on."""
    images = engine.api.images(all=True)
    found = [[image for image in images if name in f"{image['RepoTags']} {image['Labels']}"]]
    while found[-1]:
        parents = {image["Id"] for image in found[-1]}
        found.append([image for image in images if image["ParentId"] in parents])
    return found


def remove_with_children(engine, name):
    """Remove a test's own images, and what the classic builder has kept of steps on top of them: nothing is left."""
    import docker

    generations = _generations(engine, name)
    for image in itertools.chain.from_iterable(reversed(generations)):
        own = [tag for tag in image["RepoTags"] or () if name in tag]
        for reference in own or [image["Id"]]:
            # A parent without a name goes with its last child.
            with contextlib.suppress(docker.errors.NotFound):
                engine.api.remove_image(reference, force=True)
    ours = {image["Id"] for image in itertools.chain.from_iterable(generations[1:])}
    left = [
        image
        for image in engine.api.images(all=True)
        if image["Id"] in ours or name in f"{image['RepoTags']} {image['Labels']}"
    ]
    assert not left, left
