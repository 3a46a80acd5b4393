"""The end of the Ray engine that decides: it hires workers, hands out runs and listens; the runs train elsewhere."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from os.path import commonpath
from pathlib import Path
from typing import Any

from wellcond.errors import WellcondError
from wellcond.lab.cluster.cluster import Share, check_still_fits, choose_share, connected, machines_of
from wellcond.lab.cluster.hired import Hired
from wellcond.lab.cluster.settings import RaySettings
from wellcond.lab.cluster.worker import RunWorker
from wellcond.lab.models.teachers import file_sha256
from wellcond.lab.train.compare import Dispatch, JobObserver, Outcome
from wellcond.lab.train.length import StopFlag
from wellcond.lab.train.prepare import located
from wellcond.lab.train.run import SECONDS_BETWEEN_TRIES, Job
from wellcond.lab.train.run_folder import FolderInUse, RunError, writing

ATTEMPTS = 4
"""Machines of a cluster come and go: a lost worker is less often the run's own fault than on one machine."""
PATIENCE = 60.0
"""Seconds for machines to come back."""
SECONDS_TO_SAVE = 10.0
"""For runs that another run's error ends."""


def run_on_ray(
    jobs: Sequence[Job],
    *,
    observer: JobObserver,
    num_workers: int | None = None,
    settings: RaySettings | None = None,
    attempts: int = ATTEMPTS,
) -> Outcome:
    """As `run_comparison`, on the machines of a Ray cluster.

    Args:
        jobs: what to run; complete runs need no worker.
        observer: told what happens, as it happens.
        num_workers: runs at once at most; as many as the cluster takes by default.
        settings: which cluster, and what each run gets of it.
        attempts: how often the worker of a run may be lost before the run has failed.

    Raises: MissingExtraError; WellcondError without a cluster that can run the jobs, or for what concerns every run.
    """
    settings = settings or RaySettings()
    dispatch = Dispatch(jobs, observer, attempts=attempts)
    dispatch.leave_out_complete()
    if not dispatch.waiting:
        return dispatch.outcome
    with connected(settings.address) as ray, StopFlag().listening() as stop:
        left = list(dispatch.waiting)
        share = choose_share(settings, left[0], machines_of(ray))
        with _token(left) as token:
            return _Drive(ray, dispatch, share, num_workers or len(left), token, _code_of(left)).run(stop)


@contextlib.contextmanager
def _token(jobs: Sequence[Job]) -> Iterator[Path]:
    """A file by which a worker knows the folder of the comparison."""
    folder = Path(commonpath([job.folder.resolve() for job in jobs]))
    path = folder / f".wellcond-{uuid.uuid4().hex}"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _code_of(jobs: Sequence[Job]) -> dict[str, str]:
    """Files of the user's code that the jobs run, with digests."""
    specs = {located(job.recipe.model.name, (job.base or Path()).resolve()) for job in jobs if job.local_code}
    files = {spec.rpartition(":")[0] for spec in specs if ".py:" in spec}
    return {path: file_sha256(Path(path)) for path in files if Path(path).is_file()}


class _Drive:
    """The loop of one comparison."""

    def __init__(
        self, ray: Any, dispatch: Dispatch, share: Share, num_workers: int, token: Path, code: dict[str, str]
    ) -> None:
        self.ray, self.dispatch, self.share, self.num_workers = ray, dispatch, share, num_workers
        self.token, self.code = token, code
        self.workers: list[Hired] = []
        self.failed_starts = 0
        self.idle_since = time.monotonic()
        self.actors = ray.remote(RunWorker).options(
            num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0, max_concurrency=4
        )

    @property
    def busy(self) -> list[Hired]:
        return [worker for worker in self.workers if worker.job is not None]

    def run(self, stop: StopFlag) -> Outcome:
        self.dispatch.hear(self.dispatch.waiting[0], ("event", {"event": "phase", "phase": "waiting for a worker"}))
        try:
            while True:
                if stop.requested and not self.dispatch.stopping:
                    self.dispatch.stop()
                    self._tell_to_stop()
                self._hand_out()
                if not self.workers:
                    return self.dispatch.outcome
                self._watch_machines()
                self._listen()
        except WellcondError:
            self._let_runs_save()
            raise
        finally:
            for worker in list(self.workers):
                self._dismiss(worker)

    def _hand_out(self) -> None:
        """Give waiting jobs to idle workers; hire for the rest, and let go whom nobody waits for."""
        waiting = self.dispatch.waiting
        for worker in [worker for worker in self.workers if worker.job is None]:
            if not waiting:
                self._dismiss(worker)  # others may have use for its share of the cluster
            elif worker.greeting is not None:
                self._give(worker, waiting.popleft())
        for _ in range(min(self.num_workers, len(self.busy) + len(waiting)) - len(self.workers)):
            self.workers.append(Hired(self.ray, self.actors.remote(), self.token, self.code))

    def _give(self, worker: Hired, job: Job) -> None:
        with self._minding(worker):
            worker.give(job)

    def _listen(self) -> None:
        """Wait for somebody to answer, and take all answers that are there."""
        requests = [worker.request for worker in self.workers if worker.request is not None]
        if not requests or not self.ray.wait(requests, timeout=0.2)[0]:
            return
        ready = self.ray.wait(requests, num_returns=len(requests), timeout=0)[0]
        for worker in [worker for worker in self.workers if worker.request in ready]:
            with self._minding(worker):
                if worker.greeting is None:
                    worker.welcome()
                    self.failed_starts = 0
                else:
                    self._hear(worker)

    def _hear(self, worker: Hired) -> None:
        assert worker.job is not None
        if any([self.dispatch.hear(worker.job, message) for message in worker.take()]):
            worker.release()
            return
        worker.ask()
        if self.dispatch.stopping:  # once more: the first time may have been before the run began
            worker.actor.stop.remote()

    @contextlib.contextmanager
    def _minding(self, worker: Hired) -> Iterator[None]:
        """A worker that is lost, or whose run's folder cannot be used here, costs its run and not the comparison."""
        try:
            yield
        except self.ray.exceptions.RayError as error:
            job = worker.job
            self._dismiss(worker)
            if job is None:
                self._count_failed_start(error)
            else:
                self.dispatch.lose(job, f"its worker was lost: {_reason(error)}")
        except FolderInUse:  # another command has the run: wait for it, other runs first
            assert worker.job is not None
            self.dispatch.hear(worker.job, ("event", {"event": "waiting"}))
            self.dispatch.waiting.append(worker.job)
            worker.release()
            time.sleep(SECONDS_BETWEEN_TRIES)
        except RunError as error:
            assert worker.job is not None
            self.dispatch.hear(worker.job, ("error", str(error)))
            self._dismiss(worker)
        except WellcondError:
            self._dismiss(worker)
            raise

    def _count_failed_start(self, error: Exception) -> None:
        """Machines may die while a worker starts; code that is missing stays missing.

        Raises: WellcondError.
        """
        self.failed_starts += 1
        if "failed to import" in str(error) or self.failed_starts >= ATTEMPTS:
            raise WellcondError(
                "a Ray worker could not be started; wellcond must be installed for the Python of every machine of the "
                f"cluster (pip install 'wellcond[train,ray]'):\n{error}"
            ) from error

    def _watch_machines(self) -> None:
        """Those that are lost may not come back: do not wait for ever."""
        if self.busy:
            self.idle_since = time.monotonic()
        elif time.monotonic() - self.idle_since > PATIENCE:
            check_still_fits(self.ray, self.share)
            self.idle_since = time.monotonic()

    def _tell_to_stop(self) -> None:
        for worker in self.busy:
            worker.actor.stop.remote()

    def _let_runs_save(self) -> None:
        """An error ends the comparison; what the other runs have done is kept."""
        self.dispatch.stop()
        self._tell_to_stop()
        deadline = time.monotonic() + SECONDS_TO_SAVE
        while self.busy and time.monotonic() < deadline:
            with contextlib.suppress(WellcondError):
                self._listen()

    def _dismiss(self, worker: Hired) -> None:
        self.workers.remove(worker)
        worker.dismiss()


def _reason(error: Exception) -> str:
    """The line of Ray's message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in reversed(lines) if "died" in line.lower()), lines[-1])[:300]
