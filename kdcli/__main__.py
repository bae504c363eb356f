"""`python -m kdcli`."""

import os
import sys

# Python puts the working directory first, where a model from elsewhere may hold a torch.py; see
# also its option -P.
here = os.getcwd()  # noqa: PTH109 - pathlib is not loaded yet
if os.path.realpath(sys.path[0]) == here and not os.path.realpath(__file__).startswith(
    here + os.sep
):
    del sys.path[0]

from kdcli.cli import main  # noqa: E402

main()
