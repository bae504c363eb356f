"""One file per paper. `method: minilm` in a recipe is `kdcli/losses/minilm.py`: its `Settings` and its `objective`."""
