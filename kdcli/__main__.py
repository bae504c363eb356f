"""`python -m kdcli`."""

from kdcli.cli import main

main()
