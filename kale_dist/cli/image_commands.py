"""`kale-dist image`: make images for jobs ahead of time."""

from __future__ import annotations

import argparse

from kale_dist import config
from kale_dist.calls import image_checks
from kale_dist.cli.arguments import Commands, add_parser
from kale_dist.errors import ConfigError
from kale_dist.image import for_job
from kale_dist.job import records
from kale_dist.job.spec.recipe import Recipe
from kale_dist.snapshot import loading
from kale_dist.wire.blobs import FolderStore
from kale_dist.wording import needing


def add_command(commands: Commands) -> None:
    """Add `image` and its own commands."""
    parser = add_parser(commands, "image", "make images for jobs ahead of time")
    inner = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    build = add_parser(inner, "build", "make an image, unless it is there, and print its reference", _build)
    build.add_argument("--registry", metavar="PLACE", help="registry.example.com/team (the configured one)")
    build.add_argument("--base", default="", metavar="IMAGE", help="what it is built on (the configured image)")
    for option, name, what in (
        ("--package", "REQUIREMENT", "such as einops==0.8"),
        ("--apt", "NAME", "a Debian package; needs Docker"),
        ("--file", "PATH=FILE", "a file of this machine, and where it goes"),
        ("--env", "NAME=VALUE", "a variable of every process"),
        ("--index-url", "URL", "where packages come from, the first in the place of PyPI"),
    ):
        build.add_argument(
            option, action="append", default=[], metavar=name, help=f"{what}; may be given several times"
        )
    build.add_argument("--requirements", metavar="FILE", help="a requirements file")
    build.add_argument("--platform", default=Recipe().platform, help="of the cluster (%(default)s)")
    build.add_argument("--allow-torch-change", action="store_true", help="let packages replace the base's torch")
    build.add_argument("--rebuild", action="store_true", help="make it although it is there")


def _build(options: argparse.Namespace) -> int:
    recipe = Recipe(
        base=options.base, platform=options.platform, packages=options.package, apt=options.apt,
        files=dict(_pair("--file", text, "/opt/x.txt=x.txt") for text in options.file),
        environment=dict(_pair("--env", text, "NAME=value") for text in options.env), index_urls=options.index_url,
        allow_torch_change=options.allow_torch_change, rebuild=options.rebuild,
    )  # fmt: skip
    wanted = image_checks.check(recipe, None, options.requirements)
    if wanted.recipe is None:
        raise ConfigError("image build", "nothing goes on top of the base", "Add --package, --apt, --file or --env")
    settings = config.load()
    home = _registry(options, settings)
    if not (wanted.recipe.base or settings.image):
        remedy = "Name an image with Python and torch, or configure `image` (KALE_DIST_IMAGE)"
        raise ConfigError("--base", "there is no base image, and no image is configured", remedy)
    from kale_dist.image.resolve import resolve

    with records.keeping_blobs():
        resolved = resolve(
            for_job.keep_files(wanted.recipe, FolderStore(records.blobs_dir())), base=settings.image, registry=home,
            pull=settings.registry_pull if options.registry is None else "", python=loading.python_version(),
            shared=settings.registry_tags == "shared", log=for_job.log, progress=for_job.ProgressBar(),
        )  # fmt: skip
    for_job.log(f"{'Made' if resolved.was_built else 'It exists already'}: {resolved.tag}")
    print(resolved.reference)
    return 0


# -- inside ----------------------------------------------------------------------------------------------------------


def _registry(options: argparse.Namespace, settings: config.Config) -> str:
    """The registry to push to, from the option or else from the configuration."""
    with needing("images", "image", "to make an image"):
        from kale_dist.image.resolve import repository_of

    registry = options.registry if options.registry is not None else settings.registry
    repository_of(registry, "--registry" if options.registry is not None else "registry")
    return str(registry)


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(option, f"{text!r} has no '='", f"Write it as {example}")
    return name, value
