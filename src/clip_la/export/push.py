"""Upload of an exported folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError


def check_login(repo: str) -> None:
    """Refuse what can't be pushed before any work is done.

    Raises:
        ValueError: the name isn't OWNER/NAME, nobody is logged in, or the hub can't be reached.
    """
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ValueError(f"--push-to-hub {repo}: expected OWNER/NAME")
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError:
        raise ValueError(
            "not logged in to the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN to a token that may "
            "write, then run this again"
        ) from None
    except Exception as error:  # HTTP and network errors of whatever client huggingface_hub uses
        raise ValueError(f"the Hugging Face Hub refused the login, or can't be reached: {error}") from error


def push_folder(folder: Path, repo: str, *, private: bool = True) -> str:
    """Make the repository if need be, and commit all files of `folder` to it at once.

    Args:
        repo: OWNER/NAME.
        private: of a repository that is made; one that exists stays as it is.

    Returns:
        The address of the commit.

    Raises:
        ValueError: the hub refused; the exported folder is kept.
    """
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload by clip_la")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"pushing {folder} to {repo} failed ({error}); the folder is kept") from error
    return str(commit.commit_url)
