"""Train Medusa heads: accelerate launch train/medusa.py RECIPE.yaml [key.path=value ...]"""

import sys
from functools import partial

from draftheads.train import entry

main = partial(entry.main, script="medusa", kind="medusa")

if __name__ == "__main__":
    sys.exit(main())
