"""Patches of manifests: strategic merges, as `kubectl patch` does them. Pure.

The API server merges strategically into its own kinds only, not into a PyTorchJob: it does not know that a PyTorchJob
holds pods. Here the lists of a pod are merged by the key that Kubernetes gives them; all other lists are replaced.
"""

from __future__ import annotations

import copy
from typing import Any

from kale_dist.errors import ConfigError

_ARGUMENT = "patch"
_DIRECTIVE = "$patch"
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "ownerReferences": "uid",
    "resourceClaims": "name",
}
"""Lists that are merged item by item, and the field that identifies an item."""


def apply_patch(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """A patched copy.

    Args:
        target: The object.
        patch: None deletes a key; a dict with `$patch: delete` deletes the item of a list, or the dict, that it stands for;
            with `$patch: replace` it takes its place.

    Raises:
        ConfigError: The patch is wrong, or cannot be applied to this object.
    """
    return _merge_dict(copy.deepcopy(target), patch, "")


def _merge_dict(target: dict[str, Any], patch: dict[str, Any], path: str) -> dict[str, Any]:
    directive = patch.get(_DIRECTIVE)
    if directive == "replace":
        return {key: value for key, value in patch.items() if key != _DIRECTIVE}
    if directive not in (None, "merge"):
        raise _refusal(path, f"`{_DIRECTIVE}: {directive}` is not known here", "Use delete, replace or merge")
    for key, value in patch.items():
        inner = f"{path}.{key}".lstrip(".")
        if key == _DIRECTIVE:
            continue
        if key.startswith("$"):
            raise _refusal(inner, "this directive is not supported", "Use $patch")
        if value is None or (isinstance(value, dict) and value.get(_DIRECTIVE) == "delete"):
            target.pop(key, None)
        elif isinstance(value, dict):
            there = target.get(key)
            target[key] = _merge_dict(there if isinstance(there, dict) else {}, value, inner)
        elif isinstance(value, list) and key in _MERGE_KEYS:
            there = target.get(key)
            target[key] = _merge_list(there if isinstance(there, list) else [], value, _MERGE_KEYS[key], inner)
        else:
            target[key] = value
    return target


def _merge_list(target: list[Any], patch: list[Any], merge_key: str, path: str) -> list[Any]:
    """Items of the target in their order, then those that are new."""
    if any(not isinstance(item, dict) for item in patch):
        raise _refusal(path, "its items have to be objects", f"Write each with its {merge_key}")
    if any(item == {_DIRECTIVE: "replace"} for item in patch):
        return [item for item in patch if item != {_DIRECTIVE: "replace"}]
    merged = list(target)
    for item in patch:
        if merge_key not in item:
            raise _refusal(path, f"an item has no {merge_key}, by which it is found", f"Write its {merge_key}")
        places = [place for place, there in enumerate(merged) if there.get(merge_key) == item[merge_key]]
        if item.get(_DIRECTIVE) == "delete":
            merged = [there for place, there in enumerate(merged) if place not in places]
        elif places:
            merged[places[0]] = _merge_dict(merged[places[0]], item, f"{path}[{item[merge_key]}]")
        else:
            merged.append(_merge_dict({}, item, f"{path}[{item[merge_key]}]"))
    return merged


def _refusal(path: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(_ARGUMENT, f"at {path or 'its root'}: {problem}", remedy)
