"""Write the README for PyPI, where relative links and pictures lead nowhere."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)")
PICTURE = re.compile(r'(?<=src=")(?![a-z]+:)|(?<=srcset=")(?![a-z]+:)')


class AbsoluteReadme(MetadataHookInterface):
    """The README whose links and pictures are addresses in the repository of `project.urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the project's readme."""
        repository = metadata["urls"]["Repository"]
        text = (Path(self.root) / "README.md").read_text("utf-8")
        text = LINK.sub(f"{repository}/blob/main/", text)
        text = PICTURE.sub(f"{repository}/raw/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
