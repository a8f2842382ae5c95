"""A cluster for tests: Slurm's commands as small scripts, Kubernetes' interface as a small server."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

JOB_NUMBER = "4242"

SLURM = {
    "sbatch": """
        (state / "sbatch.json").write_text(json.dumps(sys.argv[1:]))
        (state / "script.sh").write_text(sys.stdin.read())
        if (state / "refuse").exists():
            print("sbatch: error: invalid partition specified: nowhere", file=sys.stderr)
            sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
        print("4242;north" if (state / "several").exists() else "4242")
    """,
    "sacct": """
        assert "--jobs=4242" in sys.argv
        if not (state / "accounting").exists():
            sys.exit("Slurm accounting storage is disabled")
        print((state / "accounting").read_text())
    """,
    "squeue": """
        assert {"--jobs=4242", "--format=%T %r"} <= set(sys.argv)
        if (state / "away").exists():
            sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
        if not (state / "queue").exists():
            sys.exit("slurm_load_jobs error: Invalid job id specified")
        active = ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING")
        for line in (state / "queue").read_text().splitlines():
            if "--states=all" in sys.argv or line.split()[0] in active:
                print(line if " " in line else f"{line} None")
    """,
    "sinfo": """
        if (state / "away").exists() or not (state / "partitions").exists():
            sys.exit("slurm_load_partitions: Unable to contact slurm controller (connect failure)")
        assert "--exact" in sys.argv  # else sinfo prints the least of unlike nodes, with a + behind it
        print((state / "partitions").read_text(), end="")
    """,
    "scancel": """
        assert sys.argv[1:] == ["4242"]
        if (state / "away").exists():
            sys.exit("scancel: error: Kill job error on job id 4242: Unable to contact slurm controller (connect failure)")
        (state / "queue").write_text("CANCELLED\\nCANCELLED\\n")
    """,
    "srun": """
        (state / "srun.json").write_text(json.dumps(sys.argv[1:]))
    """,
}
"""The commands' scripts, which use a folder `state` that tests write to and read from."""


def install_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the commands at the head of PATH; returns their folder of state."""
    state, bin = folder / "slurm", folder / "bin"
    state.mkdir()
    bin.mkdir()
    head = f"#!{sys.executable}\nimport json, os, subprocess, sys\nfrom pathlib import Path\nstate = Path({str(state)!r})\n"
    for name, text in SLURM.items():
        path = bin / name
        path.write_text(head + "\n".join(line[8:] for line in text.splitlines()))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    return state


def groups_given_to_srun(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments that srun gets when bash runs the script, one list a node."""
    state = install_slurm(folder, monkeypatch)
    environment = os.environ | {"SLURM_JOB_ID": JOB_NUMBER}
    subprocess.run(["bash"], input=script, env=environment, cwd=folder, check=True, text=True, capture_output=True)
    words = json.loads((state / "srun.json").read_text())
    return [list(own) for between, own in groupby(words, key=":".__eq__) if not between]


def as_kubelet_expands(text: str, environment: dict[str, str]) -> str:
    """`$(NAME)` for variables that are set, `$$` for `$`, all else as it is (kubernetes.io, "Use environment variables to
    define arguments")."""

    def expanded(match: re.Match) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z0-9_.-]*)\)", expanded, text)


class Kubernetes:
    """The part of a Kubernetes cluster's interface that is used, with Volcano. jobs: those that were created, by namespace and
    name; phase, log: their answers; status: of every answer that is not a log, log_status: of one."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str], dict[str, Any]] = {}
        self.phase: dict[str, str] = {"phase": "Running"}
        self.log, self.asked = "", ""
        self.status = self.log_status = 200
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                namespace = self.path.split("/")[5]
                if cluster.status == 200:
                    cluster.jobs[namespace, body["metadata"]["name"]] = body
                self.answer(body)

            def do_GET(self) -> None:
                cluster.asked = self.path
                if self.path.startswith("/api/v1/"):
                    self.answer(cluster.log)
                else:
                    self.answer({"status": {"state": cluster.phase}} if self.job() in cluster.jobs else None)

            def do_DELETE(self) -> None:
                self.answer(cluster.jobs.pop(self.job(), None))

            def job(self) -> tuple[str, str]:
                parts = self.path.split("/")
                assert parts[:5] == ["", "apis", "batch.volcano.sh", "v1alpha1", "namespaces"] and parts[6] == "jobs"
                return parts[5], parts[7]

            def answer(self, body: object) -> None:
                text = isinstance(body, str)
                self.send_response(404 if body is None else cluster.log_status if text else cluster.status)
                self.send_header("Content-Type", "text/plain" if text else "application/json")
                self.end_headers()
                self.wfile.write(body.encode() if text else json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self.server.shutdown()
        self.server.server_close()

    def write_credentials(self, path: Path) -> None:
        """A kubeconfig that leads here."""
        cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server.server_port}"}}
        context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
        users = [{"name": "me", "user": {"token": "secret"}}]
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "here", "clusters": [cluster], "contexts": [context]}
        path.write_text(yaml.safe_dump(config | {"users": users}))
