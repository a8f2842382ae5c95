"""Submissions to a cluster, read by bash as a node would, and by a YAML parser and the kubelet's rule as a pod would."""

import os
import re
import subprocess
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint

from engine.launch.running.node import torchrun
from engine.launch.running.processes import ROOT, WORKER
from engine.launch.running.torchx_application import IN_IMAGE, dry_run
from tests.cases.cluster_launches import destination, launch_for
from tests.launch.cluster_fakes import JOB_NUMBER, as_kubelet_expands, groups_given_to_srun

HOSTILE = [
    *("a b", "it's", 'say "x"', "$(touch owned)", "`touch owned`", "${HOME} $HOME", "$$ $app_id $${replica_id}"),
    *("a;touch owned", "%j%%", "--help", "a & b | c > owned", "#!*?[a]~", "ünï", "a:b,c", "$(PATH) $(SECRET)"),
]


def options(words: list[str]) -> dict[str, str]:
    """`--name=value` words as a dictionary."""
    return {name: value for name, _, value in (word.removeprefix("--").partition("=") for word in words)}


def meeting(variable: str, port: str, node: int, name: str, folder: str) -> list[str]:
    """The command of one of two nodes that meet on the first, behind the interpreter."""
    begin = ["-m", "engine.launch.running.node", variable, port, str(node), "600", "--rdzv-id", name]
    return [*begin, "--nnodes", "2", *of_each_node(4, folder)]


def alone(folder: str) -> list[str]:
    """The command of a single node, behind the interpreter."""
    return ["-m", "torch.distributed.run", "--standalone", *of_each_node(2, folder)]


def of_each_node(ranks: int, folder: str) -> list[str]:
    return [*f"--nproc-per-node {ranks} --tee 3 --log-dir".split(), folder, "--module", WORKER, folder]


# Slurm.
def sbatch_lines(script: str) -> list[dict[str, str] | None]:
    """Slurm's own lines: the options of every node, None between nodes."""
    lines = [line.split()[1:] for line in script.splitlines() if line.startswith("#SBATCH")]
    return [None if words == ["hetjob"] else options(words) for words in lines]


@pytest.mark.parametrize("name", ["run-1", *HOSTILE])
def test_bash_hands_srun_exactly_the_arguments_of_every_node(tmp_path, monkeypatch, name):
    shared = tmp_path / "shared"
    (folder := shared / name).mkdir(parents=True)
    where = destination("slurm", shared)
    script = dry_run(launch_for(where), folder)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    groups = groups_given_to_srun(script, tmp_path, monkeypatch)
    assert len(groups) == where.nodes
    for node, words in enumerate(groups):
        at = words.index(sys.executable)
        port, name = words[at + 4], words[at + 8]
        assert words[at:] == [sys.executable, *meeting("SLURM_JOB_NODELIST_HET_GROUP_0", port, node, name, str(folder))]
        assert 20000 <= int(port) < 30000 and re.fullmatch(r"switchyard-[0-9a-f]{12}", name)
        srun_options = options(words[:at])
        assert srun_options["output"] == f"{folder}/slurm-{JOB_NUMBER}-switchyard-{node}.out".replace("%", "%%")
        own = [srun_options[name] for name in ("chdir", "cpus-per-task", "kill-on-bad-exit")]
        assert own == [str(ROOT), "8", "1"]
        exported = srun_options["export"].split(",")
        assert "PATH" in exported and "ALL" not in exported
        assert "OMP_NUM_THREADS=2" in exported and "PYTHONUNBUFFERED=1" in exported
        assert "error" not in srun_options
    assert not list(tmp_path.rglob("owned"))


def test_slurm_gets_what_every_node_needs(tmp_path, monkeypatch):
    names = "PATH LC_ALL NCCL_IB_HCA DATABASE_URL AWS_SECRET_ACCESS_KEY HF_TOKEN OMP_NUM_THREADS"
    monkeypatch.setattr(os, "environ", dict.fromkeys(names.split(), "x"))
    where = destination("slurm", tmp_path, partition="gpu,fast", account="team_1.a")
    script = dry_run(launch_for(where, limit=601), tmp_path / "run")
    first, between, second = sbatch_lines(script)
    assert between is None and first | {"job-name": ""} == second | {"job-name": ""}
    asked = {"job-name": "switchyard-0", "partition": "gpu,fast", "account": "team_1.a", "time": "11", "no-requeue": ""}
    size = {"nodes": "1", "ntasks": "1", "ntasks-per-node": "1", "cpus-per-task": "8", "gpus-per-task": "4"}
    assert first == asked | size | {"mem": str(16 * 1024), "export": "LC_ALL,NCCL_IB_HCA,PATH"}
    assert sbatch_lines(script.partition("set -evx")[2]) == []  # sbatch stops reading at the first command


def test_one_node_of_slurm_meets_itself(tmp_path, monkeypatch):
    where = destination("slurm", tmp_path, nodes=1, gpus=0, ranks_per_node=2)
    script = dry_run(launch_for(where), tmp_path / "run")
    (only,) = sbatch_lines(script)
    assert not {"gpus-per-task", "partition", "account"} & set(only)
    (words,) = groups_given_to_srun(script, tmp_path, monkeypatch)
    folder = str(tmp_path / "run")
    assert words[words.index(sys.executable) + 1 :] == alone(folder)
    assert "OMP_NUM_THREADS=4" in options(words)["export"].split(",")


def test_slurm_in_a_container(tmp_path, monkeypatch):
    where = destination("slurm", tmp_path / "here", image="registry.example#team/switchyard:1", seen_as="/scratch/a b")
    words, _ = groups_given_to_srun(dry_run(launch_for(where), tmp_path / "here" / "run"), tmp_path, monkeypatch)
    srun_options = options(words)
    assert srun_options["container-image"] == "registry.example#team/switchyard:1"
    assert srun_options["container-mounts"] == "/scratch/a b:/scratch/a b"
    assert srun_options["container-workdir"] == IN_IMAGE
    assert "chdir" not in srun_options and "python" in words and words[-1] == "/scratch/a b/run"
    assert srun_options["output"].startswith("/scratch/a b/run/")


# Kubernetes.
@pytest.mark.parametrize("name", ["run-1", *HOSTILE])
def test_every_pod_gets_exactly_its_arguments(tmp_path, name):
    where = destination("kubernetes", tmp_path, seen_as="/mnt/$(PATH) x")
    pods = yaml.safe_load(dry_run(launch_for(where), tmp_path / name))["spec"]["tasks"]
    assert len(pods) == where.nodes
    seen = f"/mnt/$(PATH) x/{name}"
    for node, pod in enumerate(pods):
        (container,) = pod["template"]["spec"]["containers"]
        own = {variable["name"]: variable["value"] for variable in container["env"]}
        words = [as_kubelet_expands(word, own | {"PATH": "/bin", "SECRET": "oops"}) for word in container["command"]]
        assert "args" not in container
        variable = "VC_SWITCHYARD_0_HOSTS" if node else "TORCHX_RANK0_HOST"
        assert words == ["python", *meeting(variable, words[4], node, words[8], seen)]
        assert {"mountPath": "/mnt/$(PATH) x", "name": "mount-0", "readOnly": False} in container["volumeMounts"]


def test_kubernetes_gets_what_every_pod_needs(tmp_path):
    where = destination("kubernetes", tmp_path, namespace="research", queue="low.prio")
    text = dry_run(launch_for(where, limit=600.5), tmp_path / "run")
    assert text == dry_run(launch_for(where, limit=600.5), tmp_path / "run")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"], job["spec"]["queue"]) == ("batch.volcano.sh/v1alpha1", "Job", "low.prio")
    ends = [(policy["event"], policy["action"]) for policy in job["spec"]["policies"]]
    assert ends == [("PodFailed", "TerminateJob"), ("PodEvicted", "TerminateJob")]
    assert job["spec"]["plugins"]["svc"] == ["--publish-not-ready-addresses"]  # this gives the pods names
    for node, task in enumerate(job["spec"]["tasks"]):
        assert (task["name"], task["replicas"]) == (f"switchyard-{node}", 1)
        assert len(f"{job['metadata']['name']}-{task['name']}-0") <= 63  # the pod's name
        assert task["template"]["metadata"]["labels"]["app.kubernetes.io/instance"] == job["metadata"]["name"]
        pod = task["template"]["spec"]
        assert (pod["restartPolicy"], pod["activeDeadlineSeconds"]) == ("Never", 601)
        owner = tmp_path.stat()
        assert pod["securityContext"] == {"runAsUser": owner.st_uid, "runAsGroup": owner.st_gid}
        assert {"name": "mount-0", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
        container = pod["containers"][0]
        assert container["image"] == "registry.example/switchyard:1"
        limits, own = container["resources"]["limits"], {variable["name"]: variable["value"] for variable in container["env"]}
        assert limits == {"cpu": "8000m", "memory": f"{16 * 2**30 // 10**6}M", "nvidia.com/gpu": "4"}
        assert container["resources"]["requests"]["nvidia.com/gpu"] == "4" and own["OMP_NUM_THREADS"] == "2"
        assert own["TORCHX_JOB_ID"].endswith(job["metadata"]["name"])
        assert container["ports"][0]["containerPort"] == int(container["command"][4])
    elsewhere = yaml.safe_load(dry_run(launch_for(where), tmp_path / "other"))
    assert elsewhere["metadata"]["name"] != job["metadata"]["name"]


# The fields of a Job that a launch sets, by Volcano's CustomResourceDefinition jobs.batch.volcano.sh (v1alpha1), but for the
# pods' templates, which are Kubernetes' own. Unlike the original, this schema refuses every other field.
LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


def _text(most: int, pattern: str = "") -> dict[str, Any]:
    return {"type": "string", "maxLength": most, "pattern": pattern}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _fields(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


POLICIES = _list(_fields(action={"const": "TerminateJob"}, event={"enum": ["PodFailed", "PodEvicted"]}))
TASKS = _list(_fields(name=_text(63, LABEL), replicas=COUNT, template={"type": "object"}))
PLUGINS = {"type": "object", "additionalProperties": _list({"type": "string"})}
WHERE = {"schedulerName": _text(63), "queue": _text(253, NAME)}
SPEC = _fields(**WHERE, maxRetry=COUNT, plugins=PLUGINS, policies=POLICIES, tasks=TASKS)
ABOUT = {"apiVersion": {"const": "batch.volcano.sh/v1alpha1"}, "kind": {"const": "Job"}}
JOB = _fields(**ABOUT, metadata=_fields(name=_text(63, LABEL)), spec=SPEC)


RESEARCH = {"namespace": "research", "queue": "low.prio", "seen_as": "/mnt/$(PATH) x"}


@pytest.mark.parametrize("more", [{}, {"nodes": 1, "gpus": 0, "ranks_per_node": 2}, {"nodes": 3, "gpus": 2, **RESEARCH}])
def test_a_job_is_what_the_schemas_of_kubernetes_and_volcano_allow(tmp_path, more):
    """Without any field that they would ignore, in the oldest and the newest version of Kubernetes that have schemas."""
    where = destination("kubernetes", tmp_path, **more)
    job = yaml.safe_load(dry_run(launch_for(where, limit=600.5), tmp_path / HOSTILE[5]))
    jsonschema.validate(job, JOB)
    for task in job["spec"]["tasks"]:
        template = {"apiVersion": "v1", "kind": "PodTemplate", "template": task["template"]}
        for version in ("1.25", "1.37"):
            assert kubernetes_validate.validate(template, version, strict=True) == version


def test_one_pod_meets_itself_and_the_image_has_what_it_starts(tmp_path):
    where = destination("kubernetes", tmp_path, nodes=1, gpus=0, ranks_per_node=2)
    (task,) = yaml.safe_load(dry_run(launch_for(where), tmp_path / "run"))["spec"]["tasks"]
    (container,) = task["template"]["spec"]["containers"]
    assert container["command"] == ["python", *alone("/shared/run")]
    assert "nvidia.com/gpu" not in container["resources"]["limits"] and not container["ports"]
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert f"WORKDIR {IN_IMAGE}" in lines and "COPY engine engine" in lines
    assert any(re.search(rf"^ENV .*\bPYTHONPATH={IN_IMAGE}\b", line) for line in lines)
    assert any(line.startswith("FROM python:") for line in lines)


# On the node.
def test_nodes_find_the_first_one():
    others = ["--nnodes", "2", "--module", WORKER, "/a b"]
    first = torchrun(["HEAD", "23456", "0", "600", *others], {})
    second = torchrun(["HEAD", "23456", "1", "600", *others], {"HEAD": "node-1.job", "SLURMD_NODENAME": "node-2"})
    for command, head, host in ((first, "localhost", "1"), (second, "node-1.job", "0")):
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"] and command[-5:] == others
        torchrun_options = dict(zip(command[3:-5:2], command[4:-5:2], strict=True))
        assert torchrun_options["--rdzv-backend"] == "c10d"
        assert parse_rendezvous_endpoint(torchrun_options["--rdzv-endpoint"], 1) == (head, 23456)
        conf = _parse_rendezvous_config(torchrun_options["--rdzv-conf"])
        assert conf == {"is_host": host, "join_timeout": "600", "read_timeout": "600"}
    assert "--local-addr" not in first and second[second.index("--local-addr") + 1] == "node-2"
    with pytest.raises(KeyError, match="HEAD"):
        torchrun(["HEAD", "23456", "1", "600", *others], {})
