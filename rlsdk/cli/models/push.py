"""`rlsdk push PATH REPO`: uploads a model to the Hugging Face hub."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.system.files import UnfitFileError, check_inside, read_regular_text
from rlsdk.system.printable import printable
from rlsdk.trainer.inputs.model_config import HUB_NAME
from rlsdk.trainer.stages.model_card import FILE, with_licence

HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
"""HTTP libraries of the hub's client, which depend on its version. Their errors mean network problems."""
NEEDED = (FILE, "config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json")
"""Files without which, or with other content, an upload would not be this model."""
MAX_CARD_BYTES = 16 << 20
PUBLIC = ("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json", "generation_config.json",
          "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
          "*.model", "chat_template*", "preprocessor_config.json")  # fmt: skip
"""Files of a model folder that are uploaded. Other files, such as optimizer state and the run's configuration, are
not."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Files to upload, and their destination."""

    repo: str
    folder: Path
    card: str
    private: bool

    @property
    def files(self) -> list[Path]:
        """Files of the folder to upload, without the card."""
        return [path for path in self._public() if not _why_not_own(path)]

    @property
    def left_out(self) -> list[str]:
        """What is not uploaded because it is a link, a pipe or a device: what it leads to may be private.

        Raises:
            ConfigError: it is needed: weights, the configuration or the card.
        """
        card = self.folder / FILE
        names = [*self._public(), *([card] if os.path.lexists(card) else [])]
        said = []
        for file, why in [(path, why) for path in names if (why := _why_not_own(path))]:
            what = f"{str(file)!r} is {why}"
            if any(fnmatch(file.name, pattern) for pattern in NEEDED):
                raise ConfigError(
                    f"{what}; only files that are really in the folder are uploaded. Make a copy without links: "
                    f"cp -rL {shlex.quote(str(self.folder))} COPY"
                )
            said.append(f"not sent: {what}")
        return said

    def _public(self) -> list[Path]:
        found = sorted(path for path in self.folder.iterdir() if path.is_symlink() or not path.is_dir())
        return [path for path in found if any(fnmatch(path.name, pattern) for pattern in PUBLIC)]


def _why_not_own(path: Path) -> str:
    """Why the content of a file may not belong to its folder; empty if it does."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        return f"a symbolic link (to {os.readlink(path)!r})"
    if not stat.S_ISREG(found.st_mode):
        return "no regular file"
    return f"one of {found.st_nlink} names of a file (hard links)" if found.st_nlink > 1 else ""


def run(path: Path, repo: str, *, checkpoint: str | None, licence: str | None, private: bool, dry_run: bool) -> None:
    """Uploads a model with its card, or prints what would be uploaded.

    Raises:
        ConfigError: there is no model, or the name of the repository is invalid.
        RlsdkError: the hub refuses the upload, or cannot be reached.
    """
    upload = prepare(path, repo, checkpoint=checkpoint, licence=licence, private=private)
    for file in upload.files:
        print(printable(f"{_size(file.stat().st_size)}  {file.name}"))
    print(printable(f"{_size(len(upload.card.encode()))}  README.md (model card)"))
    visibility = "private" if private else "public"
    if dry_run:
        print(
            printable(f"dry run: nothing was sent. Without --dry-run: {visibility} model {repo}, from {upload.folder}")
        )
        return
    print(printable(f"sent: {send(upload)} ({visibility})"))


def _size(num_bytes: int) -> str:
    """Returns a size for a column; small files in kB."""
    return f"{num_bytes / 1e6:12,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:12,.1f} kB"


def prepare(path: Path, repo: str, *, checkpoint: str | None, licence: str | None, private: bool) -> Upload:
    """Finds the model, and prepares its card.

    Raises:
        ConfigError: there is no model, it has no weights, or the name of the repository is invalid.
    """
    from rlsdk.trainer.checkpoints.model_source import find_model

    if not HUB_NAME.fullmatch(repo) or "/" not in repo:
        raise ConfigError(f"REPO {repo!r}: expected org/name, as in my-name/qwen2.5-0.5b-gsm8k")
    folder = find_model(path, lambda text: print(printable(text)), checkpoint=checkpoint).model
    try:
        check_inside(path, folder)
    except UnfitFileError as error:
        raise ConfigError(
            f"{error.filename!r} {error.strerror}; give the folder of the model itself: {str(folder.resolve())!r}"
        ) from error
    upload = Upload(repo=repo, folder=folder, card="", private=private)
    for line in upload.left_out:
        print(line, file=sys.stderr)
    card = read_regular_text(folder / FILE, MAX_CARD_BYTES) if (folder / FILE).is_file() else ""
    if licence is not None:
        card = with_licence(card if card.startswith("---\n") else f"---\n\n---\n{card}", licence)
    upload = replace(upload, card=card)
    if not any(file.suffix == ".safetensors" for file in upload.files):
        raise ConfigError(f"{str(folder)!r} has no weights (*.safetensors); give a run, a checkpoint or a model folder")
    return upload


def send(upload: Upload) -> str:
    """Creates the repository if it does not exist, and uploads everything in one commit; returns its URL.

    Raises:
        RlsdkError: the hub refuses the upload, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    files: list[tuple[str, Path | bytes]] = [(file.name, file) for file in upload.files]
    if upload.card:
        files.append(("README.md", upload.card.encode()))
    changes = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files]
    api = HfApi(library_name="rlsdk")
    try:
        api.create_repo(upload.repo, private=upload.private, exist_ok=True)
        done = api.create_commit(upload.repo, changes, commit_message="Upload a model trained with rlsdk")
    except (HfHubHTTPError, LocalTokenNotFoundError, ValueError) as error:
        raise RlsdkError(
            f"the hub did not accept {upload.repo}: {error}. Log in with a token that has write permission: "
            "hf auth login, or set HF_TOKEN"
        ) from error
    except Exception as error:
        if not (isinstance(error, ConnectionError) or type(error).__module__.partition(".")[0] in HTTP_LIBRARIES):
            raise
        raise RlsdkError(
            f"{upload.repo} was not sent, because the hub cannot be reached: {type(error).__name__}: {error}. Fix the "
            "network (HF_ENDPOINT names a mirror), then run the same command again"
        ) from error
    return str(done.repo_url)
