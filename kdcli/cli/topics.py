"""Topics of `kdcli help` that are not commands."""

TOPICS = {
    "environment": """\
Environment variables
  KDCLI_DEVICE           Default of --device: auto, cpu, cuda, mps, xpu or cuda:INDEX.
  KDCLI_OUTPUT_DIR       Directory in which runs without -o are created (default: runs).
  KDCLI_CACHE            Directory of the cache (default: ~/.cache/kdcli).
  KDCLI_TEACHER_API_KEY  API key for the server that --teacher http://... names.
  KDCLI_JOIN_SECONDS     Seconds to wait for the other processes at the start (default: 40).
  HF_HOME, HF_TOKEN, HF_HUB_OFFLINE  Cache, token and offline mode of the hub.

An option overrides a variable, and a variable overrides pyproject.toml:

  [tool.kdcli]
  device = "cpu"
  output_dir = "experiments"  # the directory in which runs are created
  report_to = "none"
  strict_data = true
""",
    "exit-codes": """\
Exit codes
  0    The command did what it was asked to do.
  2    The command, the recipe, the model or the data cannot be used; the message says why.
  3    The machine cannot do it: too little memory or disk, or a missing library or device.
  4    The training diverged: the loss is no longer a number.
  5    A limit was missed: the goal of compress, a bound of evaluate, benchmark or export.
  6    A measurement was too unstable, or a part of the cache could not be deleted.
  75   The run was stopped and has a checkpoint: run the same command with --resume.
  130  Interrupted with Ctrl-C.
  1    A bug in kdcli, with a traceback: please report it.
""",
}
"""Topic -> its text."""
