"""Train an EAGLE head: accelerate launch train/eagle.py RECIPE.yaml [key.path=value ...]"""

import sys
from functools import partial

from draftheads.train import medusa

main = partial(medusa.main, script="eagle", kind="eagle3")

if __name__ == "__main__":
    sys.exit(main())
