//! The worker of a job: the process of the mount that contains the paths, or a coordinator.

use crate::locator::{PROCESS_ANSWER_LIMIT, locate_path};
use serde::Deserialize as _;
use spurline_config::{Fault, HostPort, Registry, SourceUrl};
use spurline_jobs::{JobProgress, JobReport, JobRequest};
use spurline_observe::client::AdminPeer;
use spurline_observe::dial;
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Result, url};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The worker of a job, and the source of the paths.
pub struct JobWorker {
    description: WorkerKind,
    source_url: String,
}

enum WorkerKind {
    /// The process of a mount.
    Mount {
        peer: AdminPeer,
        mountpoint: PathBuf,
    },
    Coordinator {
        at: HostPort,
        group: String,
        trust: Arc<Trust>,
    },
}

impl JobWorker {
    /// The coordinator of a group, and `paths` below `source`, as URLs or relative paths.
    ///
    /// # Errors
    /// When the registry is no coordinator, or a path is not below the source.
    pub fn of_group(
        registry: &Registry,
        group: &str,
        source: &SourceUrl,
        trust: Arc<Trust>,
        paths: &[String],
    ) -> Result<(JobWorker, Vec<String>), Fault> {
        let Registry::Coordinator(at) = registry else {
            return Err(Fault::usage(
                format!("{registry} runs no jobs: a coordinator does"),
                "give --registry coordinator://HOST:PORT, or a path in a mount of this machine, whose process does them",
            ));
        };
        let source = source.as_str().trim_end_matches('/').to_owned();
        let below = |path: &String| {
            // Absolute paths and URLs are compared with the source; other paths are relative to the source.
            let whole = path.contains("://") || path.starts_with('/');
            let url = if whole { path.parse::<SourceUrl>().ok() } else { None };
            let text = url.as_ref().map_or(path.as_str(), SourceUrl::as_str).trim_end_matches('/');
            match url::path_below(text, &source) {
                Some(rest) => String::from_utf8(rest.into_owned())
                    .map_err(|_| Fault::usage(format!("{path}: a name that is no UTF-8"), "name the folder above it")),
                None if whole => Err(Fault::usage(
                    format!("{path} is not below --source {source}"),
                    "give the source that the mounts of the group mount",
                )),
                None => Ok(path.trim_matches('/').to_owned()),
            }
        };
        let below = paths.iter().map(below).collect::<Result<_, _>>()?;
        let who = WorkerKind::Coordinator { at: at.clone(), group: group.to_owned(), trust };
        Ok((JobWorker { description: who, source_url: source }, below))
    }

    /// The mount of `paths`, and the paths below the source.
    ///
    /// # Errors
    /// When a path is in no mount, or the paths are in different mounts.
    pub fn of_paths(paths: &[String]) -> Result<(JobWorker, Vec<String>), Fault> {
        let mut place: Option<(AdminPeer, PathBuf, String)> = None;
        let mut all = Vec::with_capacity(paths.len());
        for path in paths {
            let (mountpoint, source, below) = match &place {
                // A single reading of the mount table serves all paths of a long list below the same mountpoint.
                Some((_, mountpoint, source)) if Path::new(path).is_absolute() && is_normalised(path) => {
                    match Path::new(path).strip_prefix(mountpoint) {
                        Ok(below) => (mountpoint.clone(), source.clone(), below.to_owned()),
                        Err(_) => Self::find_mount(path, &mut place)?,
                    }
                }
                _ => Self::find_mount(path, &mut place)?,
            };
            if place.as_ref().is_none_or(|known| known.1 != mountpoint || known.2 != source) {
                return Err(Fault::usage(
                    format!("{path} is in the mount at {}, other paths are not", mountpoint.display()),
                    "one job works on one mount: make a job for each",
                ));
            }
            let below = below.into_os_string().into_string().map_err(|below| {
                Fault::usage(format!("{}: a name that is no UTF-8", below.display()), "name the folder above it")
            })?;
            all.push(below);
        }
        let (peer, mountpoint, source) = place.ok_or_else(|| Fault::usage("no path was named", ""))?;
        Ok((JobWorker { description: WorkerKind::Mount { peer, mountpoint }, source_url: source }, all))
    }

    fn find_mount(
        path: &str,
        place: &mut Option<(AdminPeer, PathBuf, String)>,
    ) -> Result<(PathBuf, String, PathBuf), Fault> {
        use std::os::unix::ffi::OsStringExt as _;
        let (located, peer) = locate_path(Path::new(path))?;
        let below = PathBuf::from(std::ffi::OsString::from_vec(located.below));
        let mountpoint = located.mount.mountpoint;
        let source = located.mount.source;
        place.get_or_insert_with(|| (peer, mountpoint.clone(), source.clone()));
        Ok((mountpoint, source, below))
    }

    /// The source that the paths are below.
    pub fn source(&self) -> &str {
        &self.source_url
    }

    /// The worker as text.
    pub fn who(&self) -> String {
        match &self.description {
            WorkerKind::Mount { mountpoint, .. } => format!("the mount at {}", mountpoint.display()),
            WorkerKind::Coordinator { group, .. } => format!("the coordinator of group {group}"),
        }
    }

    /// Whether a coordinator runs the job.
    pub fn is_group(&self) -> bool {
        matches!(self.description, WorkerKind::Coordinator { .. })
    }

    /// Sends a request about a job. `since` is the submission that was seen, 0 for none: the end of an earlier job of the same
    /// paths is no answer.
    ///
    /// # Errors
    /// The error of the answer; `Unavailable` when there is none.
    pub fn send_request(&self, request: &JobRequest, since: u64) -> Result<JobReport> {
        let malformed = |error: serde_json::Error| {
            Error::new(ErrorKind::Protocol, format!("{}: the answer is malformed: {error}", self.who()))
        };
        let request = serde_json::to_value(request).map_err(malformed)?;
        let answer = match &self.description {
            WorkerKind::Mount { peer, .. } => peer.send_job_request(&request, PROCESS_ANSWER_LIMIT)?,
            WorkerKind::Coordinator { at, group, trust } => {
                spurline_membership::request_jobs(at, group, trust, &request, PROCESS_ANSWER_LIMIT)?
            }
        };
        let job = JobReport::deserialize(answer).map_err(malformed)?;
        if self.is_group() && is_earlier_end(&job.progress, since) {
            return Err(Error::new(ErrorKind::Unavailable, "the coordinator does not know the job"));
        }
        Ok(job)
    }

    /// Whether a job continues although there was no answer: after a restart, or on another coordinator with the same store.
    pub fn continues_after(&self, error: &Error) -> bool {
        is_silence(error) && self.is_group()
    }

    /// The error of [`JobWorker::send_request`] for the user: a worker that is gone is a missing prerequisite, an /// unknown job a failure.
    pub fn fault_of(&self, error: &Error) -> Fault {
        match &self.description {
            // Unmounted or killed.
            WorkerKind::Mount { peer: AdminPeer::Socket(socket, _), mountpoint }
                if dial::probe_socket(socket, None).is_err() =>
            {
                Fault::missing(
                    format!("the mount at {} is gone, and its jobs with it: {error}", mountpoint.display()),
                    "mount it again and begin the job anew",
                )
            }
            _ if error.kind() == ErrorKind::NotFound => {
                Fault::failed(error.message(), "give the same paths as when it was begun, or begin it with --submit")
            }
            _ => error.clone().into(),
        }
    }
}

/// Whether there was no answer at all.
fn is_silence(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
}

/// Whether this is the end of a job before the submission `since`.
fn is_earlier_end(job: &JobProgress, since: u64) -> bool {
    job.state.is_ended() && job.submission < since
}

/// Whether a path has no empty part, `.` or `..`.
fn is_normalised(path: &str) -> bool {
    !path.split('/').skip(1).any(|part| matches!(part, "" | "." | ".."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_jobs::JobState;

    #[test]
    fn the_end_of_an_earlier_job_is_no_answer_about_a_later_one() {
        let job = |state: JobState, submission: u64| JobProgress { state, submission, ..JobProgress::default() };
        assert!(is_earlier_end(&job(JobState::Succeeded, 3), 4));
        assert!(!is_earlier_end(&job(JobState::Succeeded, 4), 4) && !is_earlier_end(&job(JobState::Running, 3), 4));
        assert!(!is_earlier_end(&job(JobState::Stopped, 0), 0));
    }
}
