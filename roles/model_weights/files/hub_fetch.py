"""Fetch files of one revision from the Hugging Face hub, by an interpreter that has huggingface_hub (Python 3.9 on).

Usage: hub_fetch.py ARGUMENTS: a JSON object with repository, revision, files (name → bytes), into (a directory) and
workers; endpoint and token come from the client's own environment (HF_ENDPOINT, HF_TOKEN_PATH). Files grow in place and
are continued where they end: what they hold is hashed afterwards. `hf_hub_download` would begin anew with every call.
Ends with 1 and a sentence as its last line when a file cannot be had, and ends when its standard input does.
"""

import errno
import json
import os
import sys
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict

PAUSES = (1, 4)  # seconds before each further attempt; the client makes some of its own in each


def end_with_parent() -> None:
    """Nobody is left who would look at what arrives."""
    while os.read(0, 1):
        pass
    os._exit(1)


def sentence(error: Exception, arguments: Dict[str, Any], name: str) -> str:
    """Why a file cannot be had, for a person."""
    from huggingface_hub import errors  # noqa: PLC0415 - main says so when it is missing

    what, revision = arguments["repository"], arguments["revision"]
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if isinstance(error, errors.GatedRepoError):
        return f"{hub} gives {what} only to accounts that were granted it: set model_weights_hub_token to one's token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub} has no revision {revision} of {what}: correct the pin, or use another source"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} has no repository {what}, or not for this token: correct the pin, or set model_weights_hub_token"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"{what} has no file {name} at {revision}: the manifest is of another repository or revision"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the volume of {arguments['into']} is full: what has arrived is kept; free space, then run again"
    told = " ".join(str(error).split())[:200]
    return f"{name} of {what} could not be fetched from {hub} ({told}): what has arrived is kept, run again"


def final(error: Exception) -> bool:
    """Whether another attempt would end in the same way."""
    from huggingface_hub import errors  # noqa: PLC0415 - main says so when it is missing

    refused = (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.RevisionNotFoundError)
    return isinstance(error, refused) or (isinstance(error, OSError) and error.errno == errno.ENOSPC)


def continue_file(arguments: Dict[str, Any], name: str) -> str:
    """Fetch what is missing at the end of one file; empty, or a sentence. Raises whatever the client raises."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415 - main says so when it is missing
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # noqa: PLC0415

    repository, revision, size = arguments["repository"], arguments["revision"], arguments["files"][name]
    url = hf_hub_url(repository, name, revision=revision)
    found = get_hf_file_metadata(url)
    if found.commit_hash != revision:
        return f"the hub answers for {repository} with revision {found.commit_hash}, {revision} is pinned"
    if found.size != size:
        return (
            f"{name} of {repository} has {found.size} bytes on the hub, {size} in the manifest, which is of another one"
        )
    headers = build_hf_headers()
    if urllib.parse.urlsplit(found.location).netloc != urllib.parse.urlsplit(url).netloc:
        headers.pop("authorization", None)  # the store that the hub points to signs its addresses
    path = os.path.join(arguments["into"], name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "ab") as stream:
        if stream.tell() < size:
            http_get(found.location, stream, resume_size=stream.tell(), headers=headers, expected_size=size)
    return ""


def fetch(arguments: Dict[str, Any], name: str) -> str:
    """Fetch one file, taking up lost connections as long as bytes arrive; empty, or a sentence."""
    path, pauses, before = os.path.join(arguments["into"], name), list(PAUSES), 0
    while True:
        try:
            return continue_file(arguments, name)
        # the client raises its own errors, those of its HTTP library and the system's: each becomes a sentence
        except Exception as error:  # noqa: BLE001
            now = os.path.getsize(path) if os.path.exists(path) else 0
            pauses = list(PAUSES) if now > before else pauses
            before = now
            if not pauses or final(error):
                return sentence(error, arguments, name)
            time.sleep(pauses.pop(0))


def main() -> int:
    """Fetch all names, several at a time."""
    arguments = json.loads(sys.argv[1])
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        import huggingface_hub  # noqa: F401, PLC0415 - whether it is there
    except ImportError:
        print(f"{sys.executable} has no huggingface_hub: set model_weights_hub_python to an interpreter that has it")
        return 1
    with ThreadPoolExecutor(arguments["workers"]) as pool:
        failed = [text for text in pool.map(lambda name: fetch(arguments, name), arguments["files"]) if text]
    for text in failed:
        print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
