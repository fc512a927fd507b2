"""Finds models by name: on the disk first, then in one brief request to the hub."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

from qcut.common import versions
from qcut.common.failures import line_of
from qcut.errors import CheckpointError

ASK_S = 4.0
"""Seconds that the hub has to answer. transformers asks six times for each file, half a minute in all."""

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)
_FILES = (".bin", ".gguf", ".json", ".pt", ".pth", ".safetensors")


def is_name(name: str) -> bool:
    """Whether this can be the name of a model on the hub: ``owner/model``, or one word; no path, and no file."""
    plain = _NAME.fullmatch(name) is not None and ".." not in name and "--" not in name
    return plain and not name.endswith(_FILES) and not os.path.lexists(name)


def is_here(name: str) -> bool:
    """Whether this names a folder, or a ``.gguf`` file, of this machine."""
    path = Path(name)
    return bool(name) and (path.is_dir() or (path.suffix == ".gguf" and path.is_file()))


def answers(name: str, *, subfolder: str = "", **options: Any) -> bool:
    """Find a model that is no folder of this machine.

    Args:
        name: what stands where a folder or a name of the hub may stand.
        subfolder: of the model, where its ``config.json`` lies.
        options: that ``from_pretrained`` takes; ``cache_dir``, ``revision``, ``token`` and ``local_files_only`` are
            heeded.

    Returns:
        Whether the hub answers; False if only its cache on this disk has the model. transformers is then to be given
        ``local_files_only=True``, since it would wait for every file.

    Raises:
        CheckpointError: the name is a path, which is never asked for; or neither the cache nor the hub has the model,
            or the hub does not answer within `ASK_S`.
        UnsupportedError: transformers is missing, or too old.
    """
    if not is_name(name):
        other = ", and no GGUF file" if name.endswith(".gguf") else ""
        raise CheckpointError(f"{name}: not a directory{other}" if name else "'': not a directory")
    try:
        import huggingface_hub as hub
    except ImportError:
        versions.transformers()  # says what to install
        raise
    file = f"{subfolder}/config.json".removeprefix("/")
    where = {key: options[key] for key in ("cache_dir", "revision") if options.get(key) is not None}
    cached = isinstance(hub.try_to_load_from_cache(name, file, **where), str)
    parent = Path(name).parent
    if not cached and parent.name and parent.exists():
        raise CheckpointError(f"{name}: not a directory; the hub is not asked, since {parent} is a directory here")
    if options.get("local_files_only"):
        problem = "it was not to be asked"
    else:
        url = hub.hf_hub_url(name, file, revision=options.get("revision"))
        problem = _ask(url, options.get("token"))
    if not problem:
        return True
    if cached:
        return False
    raise CheckpointError(
        f"{name}: not a directory here, not in the hub's cache on this disk, and of the hub: {problem}"
    )


def _ask(url: str, token: str | bool | None) -> str:
    """Ask for a file's headers once; returns what is wrong, empty if the hub has the file."""
    import huggingface_hub as hub

    found = [f"it does not answer within {ASK_S:g} s"]

    def ask() -> None:
        try:
            hub.get_hf_file_metadata(url, token=token, timeout=ASK_S)
            found.append("")
        except Exception as error:  # of dozens of kinds
            found.append(line_of(error))

    # A look-up of the host's name has no limit of time of its own.
    thread = threading.Thread(target=ask, name="qcut-hub", daemon=True)
    thread.start()
    thread.join(ASK_S)
    return found[-1]
