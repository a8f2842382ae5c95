"""TorchX's schedulers for Slurm and Kubernetes, with what they get wrong put right (TorchX 0.7.0)."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator

from kubernetes import client, config
from kubernetes.client.rest import ApiException
from torchx import specs
from torchx.runner import Runner
from torchx.schedulers.api import DescribeAppResponse
from torchx.schedulers.kubernetes_scheduler import JOB_STATE, KubernetesScheduler
from torchx.schedulers.slurm_scheduler import SLURM_STATES, SlurmScheduler
from torchx.specs import AppDryRunInfo, AppState
from urllib3.exceptions import HTTPError

from engine.errors import InputError

SESSION = "switchyard"

MORE_SLURM_STATES = {"CONFIGURING": AppState.PENDING, "COMPLETING": AppState.RUNNING, "SIGNALING": AppState.RUNNING}
"""Of a job in the queue, which TorchX never asks."""

WORST_FIRST = (
    AppState.FAILED,
    AppState.CANCELLED,
    AppState.RUNNING,
    AppState.PENDING,
    AppState.SUCCEEDED,
    AppState.UNKNOWN,
)
"""Which state of a part is that of the whole job."""


class SlurmJobs(SlurmScheduler):
    """TorchX gives up on a job that was cancelled, whose state reads "CANCELLED by 1000", takes the state of a job's last node
    for that of the job, and needs a cluster with accounting."""

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        return super().schedule(dryrun_info).partition(";")[0]  # sbatch of several clusters adds the cluster's name

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        words = self._words(app_id)
        states = {SLURM_STATES.get(word) or MORE_SLURM_STATES.get(word, AppState.UNKNOWN) for word in words}
        if not states:
            return None
        state = next(state for state in WORST_FIRST if state in states)
        return DescribeAppResponse(app_id=app_id, state=state, msg=", ".join(dict.fromkeys(words)))

    def _words(self, app_id: str) -> list[str]:
        """Slurm's word on every node of a job: from its accounting, or from its queue where there is none, or not yet."""
        ways = (
            ["sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={app_id}"],
            ["squeue", "--noheader", "--format=%T", f"--jobs={app_id}"],
        )
        if not any(shutil.which(command) for command, *_ in ways):
            raise FileNotFoundError(2, "no such command", "sacct")
        for command in ways:
            if shutil.which(command[0]):
                asked = subprocess.run(command, capture_output=True, text=True)
                if asked.returncode == 0 and asked.stdout.strip():
                    return [line.split()[0] for line in asked.stdout.splitlines() if line.strip()]
        return []


class KubernetesJobs(KubernetesScheduler):
    """TorchX knows no credentials but those in a kubeconfig and goes on without any, breaks on a job that is completing, and
    takes a job that is gone, and a pod that has not started, for errors."""

    def _api_client(self):
        if self._client is None:
            configuration = client.Configuration()
            try:
                try:
                    config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
                except config.ConfigException:
                    config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                raise InputError(
                    "there are no credentials for a Kubernetes cluster here; set KUBECONFIG, or write ~/.kube/config"
                ) from None
            configuration.retries = False
            self._client = client.ApiClient(configuration)
        return self._client

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        namespace, name = app_id.split(":")
        try:
            job = self._custom_objects_api().get_namespaced_custom_object_status(
                group="batch.volcano.sh", version="v1alpha1", namespace=namespace, plural="jobs", name=name
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        volcano_state = job.get("status", {}).get("state", {})
        phase = volcano_state.get("phase", "Pending")
        state = AppState.RUNNING if phase == "Completing" else JOB_STATE.get(phase, AppState.UNKNOWN)
        return DescribeAppResponse(
            app_id=app_id, state=state, msg=": ".join(filter(None, (phase, volcano_state.get("message"))))
        )

    def log_iter(self, *arguments, **more) -> Iterable[str]:
        try:
            return super().log_iter(*arguments, **more)
        except ApiException as error:
            if error.status in (400, 404):
                return ()
            raise


def runner() -> Runner:
    """TorchX's runner with these two schedulers and no other."""
    return Runner(
        SESSION, {"slurm": lambda name, **_: SlurmJobs(name), "kubernetes": lambda name, **_: KubernetesJobs(name)}
    )


@contextlib.contextmanager
def as_input_errors() -> Iterator[None]:
    """Turn what can go wrong between this machine and a cluster into one line for a person."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(
            f"{error.filename}, a command of Slurm, is not on this machine; go on where it is, on a login node of the cluster"
        ) from None
    except specs.UnknownAppException:
        raise InputError("the cluster does not know this job any more") from None
    except subprocess.CalledProcessError as error:
        raise InputError(f"{error.cmd[0]} ended with exit code {error.returncode}; what it said is above") from None
    except ApiException as error:
        what = {
            401: "it does not know these credentials",
            403: "these credentials may not do that",
            404: "it has no Volcano, or no such namespace; Volcano is what starts all nodes of a job together (volcano.sh)",
        }.get(error.status, error.reason or "no reason given")
        raise InputError(f"Kubernetes refused ({error.status}): {what}") from None
    except HTTPError as error:
        raise InputError(f"the Kubernetes cluster cannot be reached: {error}") from None
