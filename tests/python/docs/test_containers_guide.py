"""What docs/containers.md says of mount propagation and of its sidecar holds for the namespaces of containers.

A container is a mount namespace here, with a PID namespace where its end matters. Neither Docker nor Kubernetes runs.
"""

import os
import shlex
import subprocess

import pytest
import torch
import yaml

from guides import blocks, rows
from mounts import PATIENCE
from program import DONE, find_binary

GUIDE = "containers.md"

# Runs a script in a container that has the shared folder $1/shown with the propagation $2.
PRELUDE = """
    set -e; cd "$1"; mount -t tmpfs shown shown; mount --make-rshared shown
    container() { unshare -m --propagation unchanged bash -c "mount --make-$1 '$PWD/shown'; $2"; }
    wait_for() { for n in $(seq 100); do ls shown/m 2> /dev/null | grep -q . && return; sleep 0.1; done; }
"""


@pytest.fixture
def pod(tmp_path):
    """A folder with `models`, and `shown` for the mounts of containers."""
    (tmp_path / "shown").mkdir()
    (tmp_path / "models").mkdir()
    torch.save({"a": torch.ones(3)}, tmp_path / "models/a.pt")
    return tmp_path


def run(folder, script, *args):
    """Runs a script of root with mounts of its own, in a PID namespace, so that no daemon stays."""
    command = ["unshare", "-pfm", "--mount-proc", "--propagation", "private", "bash", "-c", PRELUDE + script, "bash"]
    env = {**os.environ, "CKPTFS": str(find_binary()), "LC_ALL": "C"}
    done = subprocess.run(
        list(map(str, [*command, folder, *args])), capture_output=True, text=True, timeout=PATIENCE, env=env
    )
    assert done.returncode == DONE, done
    return done.stdout


@pytest.mark.parametrize("row", rows(GUIDE, "the container has the directory as"), ids=lambda row: row[0].split("`")[1])
def test_propagation_is_as_in_the_table(pod, row):
    kind, (into_container, onto_host) = row[0].split("`")[1], row[1:]
    host_mounts = """
        mkdir shown/m; container "$2" 'touch shown/ready; while [ ! -e shown/go ]; do sleep 0.1; done; ls shown/m' &
        while [ ! -e shown/ready ]; do sleep 0.1; done
        "$CKPTFS" mount -q models shown/m; touch shown/go; wait $!; "$CKPTFS" unmount shown/m > /dev/null"""
    assert ("a.safetensors" in run(pod, host_mounts, kind)) == (into_container == "yes")
    container_mounts = """
        mkdir shown/m; container "$2" '"$CKPTFS" mount -q models shown/m; ls shown/m > /dev/null'; ls shown/m"""
    assert ("a.safetensors" in run(pod, container_mounts, kind)) == (onto_host == "yes")
    before = 'mkdir shown/m; "$CKPTFS" mount -q models shown/m; container "$2" "ls shown/m"'
    assert "a.safetensors" in run(pod, before, kind)


def test_the_sidecar_of_the_pod_heals_its_mount(pod):
    (spec,) = blocks(GUIDE, "yaml")
    sidecar = yaml.safe_load(spec)["spec"]["initContainers"][0]
    command = [*sidecar["command"], *sidecar["args"]]
    replaced = [word.replace("/shown/models", f"{pod}/shown/m").replace("/models", f"{pod}/models") for word in command]
    probe = shlex.join(sidecar["startupProbe"]["exec"]["command"]).replace("/shown/models", f"{pod}/shown/m")
    (pod / "bin").mkdir()
    (pod / "bin/ckptfs").symlink_to(find_binary())
    script = f"""
        PATH=$1/bin:$PATH
        sidecar() {{ unshare -pfm --mount-proc --propagation unchanged {shlex.join(replaced)} 2> /dev/null & }}
        started() {{ for n in $(seq 100); do {probe} && return; sleep 0.1; done; return 1; }}
        look() {{ echo "$1: $(container rslave 'ls shown/m 2>&1')"; }}
        sidecar; started; look started
        kill -KILL $(pgrep -P $!); wait $! || true; look killed
        sleep 2  # until the kernel asks the dead daemon for the attributes again: then mkdir fails
        sidecar; for n in $(seq 100); do ls shown/m > /dev/null 2>&1 && break; sleep 0.1; done; look restarted
        kill -TERM $(pgrep -P $!); wait $!; echo "exit code $?"; look ended
    """
    lines = run(pod, script).splitlines()
    assert lines[0] == "started: a.safetensors" and lines[2] == "restarted: a.safetensors", lines
    assert lines[1].endswith("Transport endpoint is not connected"), lines
    assert lines[3:] == ["exit code 0", "ended: "], lines
