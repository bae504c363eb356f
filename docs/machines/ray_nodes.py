"""Run kdcli on all nodes of a Ray cluster: ray job submit -- python ray_nodes.py NODES GPUS

Ray chooses the nodes, and torchrun starts the processes on each of them. If a node is lost, all
start again and --resume continues. The nodes need kdcli and a common /shared.
"""

import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

COMMAND = """
kdcli distill bert-base-uncased --recipe minilm-6x768 --data /shared/tokens \
  -o /shared/runs/6x768 --resume
"""
NODES, GPUS = map(int, sys.argv[1:3])
WORDS = sys.argv[3:] or COMMAND.split()  # A worker of Ray has its own sys.argv
ATTEMPTS = 20


@ray.remote(num_cpus=1)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(num_cpus=1, max_retries=0)
def run_node(rank, first):
    launcher = ["torchrun", "--nnodes", str(NODES), "--node-rank", str(rank)]
    launcher += ["--nproc-per-node", str(max(1, GPUS)), "--master-addr", first]
    launcher += ["--master-port", "29500", "-m", *WORDS]
    return subprocess.run(launcher, check=False).returncode


def attempt():
    bundle = {"CPU": 1, "GPU": GPUS} if GPUS else {"CPU": 1}
    group = placement_group([bundle] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(task, node):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        return task.options(scheduling_strategy=place, num_gpus=GPUS)

    try:
        first = ray.get(on(address, 0).remote())
        return max(ray.get([on(run_node, node).remote(node, first) for node in range(NODES)]))
    except ray.exceptions.RayError as error:
        print(error)
        return 1
    finally:
        ray.util.remove_placement_group(group)


ray.init()
sys.exit(next((0 for _ in range(ATTEMPTS) if attempt() == 0), 1))
