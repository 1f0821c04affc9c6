"""The lowest versions that pyproject.toml allows of what the core needs, as constraints for pip; see `make
test-lowest`.
"""

import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
for requirement in project["dependencies"]:
    if not requirement.startswith("torch>="):
        print(requirement.partition(",")[0].replace(">=", "=="))
