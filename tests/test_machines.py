"""The files of docs/machines: their launchers would take them, and kdcli the command in them."""

import argparse
import dataclasses
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from kdcli.cli import app
from kdcli.recipe.resolve import read_recipe

FOLDER = Path(__file__).parents[1] / "docs" / "machines"
FILES = sorted(path.name for path in FOLDER.iterdir())
LAUNCHERS = [name for name in FILES if name != "teacher_vectors.py"]


OF_RESOURCES = {"accelerators", "use_spot", "infra", "cpus", "memory", "instance_type", "disk_size"}
OF_RESOURCES |= {"image_id", "ports"}


def text_of(name):
    return (FOLDER / name).read_text("utf-8")


def words_after(name, program):
    """The arguments of the one command of a program in a file, variables left as they are."""
    text = re.sub(r"\\\n|\n#  ", " ", text_of(name))
    (line,) = [at for at in text.splitlines() if re.search(rf"(^|\s|# ){re.escape(program)} ", at)]
    return shlex.split(line[line.index(f"{program} ") + len(program) :])


def kdcli_words(name):
    text = re.sub(r"\\\n|\n#  ", " ", text_of(name))
    (found,) = re.findall(r"\bkdcli (distill .*?)['\n]", text)
    return shlex.split(found)


def test_every_file_is_known_and_linked():
    known = ["accelerate.yaml", "hf-jobs.sh", "jobset.yaml", "ray_nodes.py", "skypilot.yaml"]
    assert [*known, "slurm.sh", "teacher_vectors.py", "torchrun.sh"] == FILES
    page = (FOLDER.parent / "machines.md").read_text("utf-8")
    assert [name for name in FILES if f"(machines/{name})" not in page] == []


def test_scripts_are_shell():
    scripts = {name: text_of(name) for name in FILES if name.endswith(".sh")}
    sky = yaml.safe_load(text_of("skypilot.yaml"))
    for script in (*scripts.values(), sky["setup"], sky["run"], *container()["args"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, capture_output=True)


def container():
    (job,) = yaml.safe_load(text_of("jobset.yaml"))["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]["containers"][0]


def test_jobset_names_its_first_pod_and_asks_for_the_gpus_that_it_uses():
    jobset = yaml.safe_load(text_of("jobset.yaml"))
    (job,) = jobset["spec"]["replicatedJobs"]
    pods, name = job["template"]["spec"], jobset["metadata"]["name"]
    words = words_after("jobset.yaml", "torchrun")
    parsed = get_args_parser().parse_args(
        [word.replace("$JOB_COMPLETION_INDEX", "0") for word in words]
    )
    assert parsed.master_addr == f"{name}-{job['name']}-0-0.{name}"
    assert int(parsed.nnodes) == pods["parallelism"] == pods["completions"]
    assert int(parsed.nproc_per_node) == container()["resources"]["limits"]["nvidia.com/gpu"]
    assert parsed.master_port == container()["ports"][0]["containerPort"]


def test_scripts_are_python():
    for name in ("ray_nodes.py", "teacher_vectors.py"):
        compile(text_of(name), name, "exec")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_command_in_them_is_one_of_kdcli(name):
    verb, teacher, *words = kdcli_words(name)
    found = typer.main.get_command(app).commands[verb]
    context = found.make_context(verb, [teacher, *words], resilient_parsing=True)
    assert context.params["teacher"] == "bert-base-uncased"
    assert context.params["resume"]
    assert str(context.params["output_dir"]).endswith("runs/6x768")
    assert context.params["data"].endswith("/tokens")
    assert read_recipe(context.params["recipe"], "distill")["verb"] == "distill"
    options = {option for parameter in found.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options


@pytest.mark.parametrize("name", ["torchrun.sh", "skypilot.yaml"])
def test_torchrun_takes_its_options(name):
    words = [word.replace("$SKYPILOT_NODE_RANK", "0") for word in words_after(name, "torchrun")]
    parsed = get_args_parser().parse_args(words)
    assert (parsed.module, parsed.training_script) == (True, "kdcli")
    assert parsed.nnodes
    assert parsed.nproc_per_node


def test_accelerate_takes_its_configuration():
    values = yaml.safe_load(text_of("accelerate.yaml"))
    assert set(values) <= {field.name for field in dataclasses.fields(ClusterConfig)}
    config = ClusterConfig(**values)
    assert (config.distributed_type.value, config.compute_environment.value) == (
        "MULTI_GPU",
        "LOCAL_MACHINE",
    )
    assert config.num_processes % config.num_machines == 0
    words = words_after("accelerate.yaml", "accelerate launch")
    parsed = launch_command_parser().parse_args([word.replace("$RANK", "1") for word in words])
    assert (parsed.module, parsed.training_script, parsed.config_file) == (
        True,
        "kdcli",
        "accelerate.yaml",
    )


def test_slurm_signals_before_the_end_and_asks_for_a_task_a_gpu():
    head = [
        line.split()[1:] for line in text_of("slurm.sh").splitlines() if line.startswith("#SBATCH")
    ]
    parser = argparse.ArgumentParser()
    for name in ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--requeue", action="store_true")
    found = parser.parse_args([word for line in head for word in line])
    assert found.ntasks_per_node == found.gpus_per_node
    assert re.fullmatch(r"TERM@\d+", found.signal)
