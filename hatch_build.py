"""What hatchling calls when it builds the package."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AbsoluteLinks(MetadataHookInterface):
    """The README, as PyPI shows it: relative links, which lead nowhere there, lead to the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = metadata["urls"]["Repository"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/main/", text)
        text = text.replace('src="docs/', f'src="{repository}/raw/main/docs/')
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
