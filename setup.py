"""Where setuptools finds the package; all else is in pyproject.toml.

The folders are at the top of the repository. Links in src/draftheads make src a plain source root
for pip, type checkers and editors. A checkout without symbolic links, Windows' default, has text
files in their place, and then the folders are mapped one by one.
"""

from pathlib import Path

from setuptools import setup

FOLDERS = ("heads", "infer", "train", "recipes", "scripts")

package_dir = {"": "src"}
if not Path("src/draftheads/heads").is_dir():
    package_dir |= {f"draftheads.{folder}": folder for folder in FOLDERS}
setup(package_dir=package_dir)
