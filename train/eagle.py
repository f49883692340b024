"""Train an EAGLE head: accelerate launch train/eagle.py RECIPE.yaml [key.path=value ...]"""

import sys
from functools import partial

from draftheads.train import entry

main = partial(entry.main, script="eagle", kind="eagle3")

if __name__ == "__main__":
    sys.exit(main())
