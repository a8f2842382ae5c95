"""TorchX's schedulers for Slurm and Kubernetes, with their faults put right (TorchX 0.7.0)."""

import contextlib
import os
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
from engine.launch.running import slurm

SESSION = "switchyard"

MORE_SLURM_STATES = {"CONFIGURING": AppState.PENDING, "SIGNALING": AppState.RUNNING}
"""States of a job in the queue, which TorchX never asks."""

COMPLETING = "COMPLETING"
"""State of a part with its processes being ended. On a node that does not answer that takes until it is given up."""

FIRST = (AppState.RUNNING, AppState.PENDING, AppState.FAILED, AppState.CANCELLED, AppState.SUCCEEDED, AppState.UNKNOWN)
"""States of parts in order of precedence for that of the whole job: nothing is over, and no log complete, before all
parts have ended."""


class SlurmJobs(SlurmScheduler):
    """TorchX gives up on a cancelled job with the state "CANCELLED by 1000", takes the state of a job's last node for
    that of the job, needs a cluster with accounting, and hides Slurm's words on a job that it refuses."""

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        request = dryrun_info.request
        try:
            answer = slurm.asked(request.cmd, request.materialize())
        except InputError as error:
            raise slurm.MaybeSubmittedError(f"{error}; the job may have been submitted all the same, squeue tells") from None
        if answer.returncode:
            raise InputError(f"Slurm refused the job: {slurm.fault_of(answer)}")
        return answer.stdout.strip().partition(";")[0]  # sbatch of several clusters adds the cluster's name

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        words = slurm.words_on(app_id)
        states: dict[AppState, list[str]] = {}
        for word in words:
            if word.state != COMPLETING:
                state = SLURM_STATES.get(word.state) or MORE_SLURM_STATES.get(word.state, AppState.UNKNOWN)
                states.setdefault(state, []).append(str(word))
        ending = [str(word) for word in words if word.state == COMPLETING]
        if ending and not {AppState.FAILED, AppState.CANCELLED} & set(states):
            states.setdefault(AppState.RUNNING, []).extend(ending)
        known = [state for state in FIRST if state in states]
        if not known:
            return None
        state, *others = known
        wrong = [other for other in others if other in (AppState.FAILED, AppState.CANCELLED)]
        said = dict.fromkeys(word for part in (state, *wrong) for word in states[part])
        return DescribeAppResponse(app_id=app_id, state=state, msg=", ".join(said))

    def _cancel_existing(self, app_id: str) -> None:
        answer = slurm.asked(["scancel", app_id])
        if answer.returncode:
            raise InputError(f"Slurm would not end the job: {slurm.fault_of(answer)}")


class KubernetesJobs(KubernetesScheduler):
    """TorchX knows no credentials but those in a kubeconfig and goes on without any, breaks on a job that is
    completing, and takes a job that is gone, and a pod that has not started, for errors."""

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
    return Runner(SESSION, {"slurm": lambda name, **_: SlurmJobs(name), "kubernetes": lambda name, **_: KubernetesJobs(name)})


@contextlib.contextmanager
def as_input_errors() -> Iterator[None]:
    """Turn the errors between this machine and a cluster into one line for a person."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(
            f"{error.filename}, a command of Slurm, is not on this machine; go on where it is, on a login node of the cluster"
        ) from None
    except specs.UnknownAppException:
        raise InputError("the cluster does not know this job any more") from None
    except ApiException as error:
        what = {
            401: "it does not know these credentials",
            403: "these credentials may not do that",
            404: "it has no Volcano, or no such namespace; Volcano is what starts all nodes of a job together (volcano.sh)",
        }.get(error.status, error.reason or "no reason given")
        raise InputError(f"Kubernetes refused ({error.status}): {what}") from None
    except HTTPError as error:
        raise InputError(f"the Kubernetes cluster cannot be reached: {error}") from None
